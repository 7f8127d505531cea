import pytest
import torch
from flowrl_rewards.clipscore import CLIPScore

PROMPTS = ["a red circle", "two blue stars", "a green ring"]


def test_it_is_the_logit_over_its_scale(tiny_clip, random_images):
    from flowrl_rewards.pickscore import PickScore

    made = CLIPScore(model=tiny_clip, device="cpu")
    logits = PickScore("raw", model=tiny_clip, tokenizer=tiny_clip, device="cpu")
    scores = made(random_images(3), PROMPTS, [{}] * 3)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    expected = logits(random_images(3), PROMPTS, [{}] * 3) / 100
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=0)
    assert (scores.abs() <= 1).all() and made.bounds == (-1, 1)
    unused = CLIPScore(dtype="bf16")
    assert "_loaded" not in vars(unused.clip)
    assert "openai/clip-vit-large-patch14" in unused.version and "bf16" in unused.version


def test_gradients_reach_the_pixels(tiny_clip, random_images, right_slopes):
    made = CLIPScore(model=tiny_clip, device="cpu")
    assert made.differentiable is True
    right_slopes(lambda images: made(images, PROMPTS, [{}] * 3), random_images(3, 40, 56))


@pytest.mark.weights
def test_published_weights_score_in_the_usual_range_and_know_colours():
    made = CLIPScore()
    for found in made.fixtures():
        both = torch.stack([found["better"], found["worse"]])
        scores = made(both, [found["prompt"]] * 2, [{}] * 2)
        assert scores[0] > scores[1]
        assert 0.2 < scores[0] < 0.35


@pytest.mark.weights
def test_published_weights_score_as_by_the_reference_processor():
    from flowrl_rewards.fixtures import square, word
    from flowrl_rewards.networks.clip import VIT_L14
    from PIL import Image
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images, prompts = torch.stack([square("red", 512), word("HELLO", 512)]), ["a red square", "a"]
    levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pixels = CLIPImageProcessorPil()([Image.fromarray(i) for i in levels], return_tensors="pt")
    text = AutoTokenizer.from_pretrained(VIT_L14)(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = CLIPModel.from_pretrained(VIT_L14)(**pixels, **text).logits_per_image
    scores = CLIPScore(device="cpu")(images, prompts, [{}] * 2)
    torch.testing.assert_close(scores, logits.diagonal() / 100, rtol=0, atol=0.002)

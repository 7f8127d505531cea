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

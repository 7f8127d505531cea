import pytest
import torch
from flowrl_rewards.pickscore import PickScore

PROMPTS = ["a red circle", "two blue stars", "a green ring"]
BLANK = [{}] * 3


def make(folder, scale):
    return PickScore(scale, model=folder, tokenizer=folder, device="cpu")


def test_the_three_scales_are_one_cosine_within_their_bounds(tiny_clip, random_images):
    images = random_images(3)
    scores = {}
    for scale in ("cosine", "raw", "div26"):
        made = make(tiny_clip, scale)
        scores[scale] = made(images, PROMPTS, BLANK)
        low, high = made.bounds
        assert ((scores[scale] > low) & (scores[scale] < high)).all()
    assert high == pytest.approx(100 / 26)
    torch.testing.assert_close(scores["raw"], 100 * scores["cosine"], rtol=1e-4, atol=0)
    torch.testing.assert_close(scores["div26"], scores["raw"] / 26)
    with pytest.raises(ValueError, match="div26, raw, cosine, not 'half'"):
        PickScore("half")


def test_raw_is_transformers_own_logit(tiny_clip, random_images):
    from flowrl_rewards.networks.preprocess import clip_pixels
    from transformers import AutoTokenizer, CLIPModel

    text = AutoTokenizer.from_pretrained(tiny_clip)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = CLIPModel.from_pretrained(tiny_clip)(
            pixel_values=clip_pixels(random_images(3), 32), **text
        ).logits_per_image
    torch.testing.assert_close(
        make(tiny_clip, "raw")(random_images(3), PROMPTS, BLANK), logits.diagonal()
    )

import pytest
import torch
from flowrl_rewards.pickscore import PickScore

PROMPTS = ["a red circle", "two blue stars", "a green ring"]


def test_the_three_scales_are_those_of_transformers_own_logit_within_their_bounds(
    tiny_clip, random_images
):
    from flowrl_rewards.networks.preprocess import clip_pixels
    from transformers import AutoTokenizer, CLIPModel

    images, scores = random_images(3), {}
    for scale in ("cosine", "raw", "div26"):
        made = PickScore(scale, model=tiny_clip, tokenizer=tiny_clip, device="cpu")
        scores[scale] = made(images, PROMPTS, [{}] * 3)
        low, high = made.bounds
        assert ((scores[scale] > low) & (scores[scale] < high)).all()
    assert high == pytest.approx(100 / 26)
    torch.testing.assert_close(scores["raw"], 100 * scores["cosine"], rtol=1e-4, atol=0)
    torch.testing.assert_close(scores["div26"], scores["raw"] / 26)
    with pytest.raises(ValueError, match="div26, raw, cosine, not 'half'"):
        PickScore("half")
    text = AutoTokenizer.from_pretrained(tiny_clip)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = CLIPModel.from_pretrained(tiny_clip)(
            pixel_values=clip_pixels(images, 32), **text
        ).logits_per_image
    torch.testing.assert_close(scores["raw"], logits.diagonal())

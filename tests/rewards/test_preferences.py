"""Rewards of published networks are those of their libraries' own forward."""

import pytest
import torch
import torch.nn.functional as F
from flowrl_rewards.aesthetic import Aesthetic
from flowrl_rewards.hpsv2 import HPSv2
from flowrl_rewards.networks.preprocess import clip_pixels
from flowrl_rewards.pickscore import PickScore
from published_layout import save_aesthetic

PROMPTS = ["a red circle", "two blue stars", "a red circle", "a green ring"]


def test_the_three_scales_are_those_of_transformers_own_logit_within_their_bounds(
    tiny_clip, random_images
):
    from transformers import AutoTokenizer, CLIPModel

    images, scores = random_images(4), {}
    for scale in ("cosine", "raw", "div26"):
        made = PickScore(scale, model=tiny_clip, tokenizer=tiny_clip, device="cpu")
        scores[scale] = made(images, PROMPTS, [{}] * 4)
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


def test_it_is_the_cosine_of_open_clips_own_forward_without_its_scale(tiny_hps, random_images):
    """open_clip's own forward on black-padded images, and the diagonal."""
    import open_clip

    architecture, folder = tiny_hps
    made = HPSv2(architecture=architecture, model=folder, device="cpu")
    model = open_clip.create_model(architecture, pretrained=f"{folder}/HPS_v2.1_compressed.pt")
    texts = open_clip.get_tokenizer(architecture)(PROMPTS)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (model.visual.image_mean, model.visual.image_std)
    )
    for height, width in [(32, 32), (32, 20), (14, 32)]:
        images = random_images(4, height, width)
        gaps = [max(height, width) - width, max(height, width) - height]
        padded = F.pad(images, [g for gap in gaps for g in (gap // 2, gap - gap // 2)])
        with torch.no_grad():
            vectors = model.eval()((padded - mean) / std, texts)
        expected = (vectors[0] @ vectors[1].T).diagonal()
        torch.testing.assert_close(made(images, PROMPTS, [{}] * 4), expected, rtol=1e-4, atol=1e-5)
        assert expected.std() > 0.01


def test_it_is_the_published_head_on_the_unit_vector_of_the_image(
    tiny_clip, tmp_path, random_images
):
    from transformers import CLIPVisionModelWithProjection

    layers = save_aesthetic(tmp_path)
    with torch.no_grad():
        vectors = CLIPVisionModelWithProjection.from_pretrained(tiny_clip)(
            pixel_values=clip_pixels(random_images(3), 32)
        ).image_embeds
        expected = layers(vectors / vectors.norm(dim=-1, keepdim=True)).squeeze(1)
    made = Aesthetic(model=tiny_clip, head=str(tmp_path), device="cpu")
    scores = made(random_images(3), ["any"] * 3, [{}] * 3)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.01
    assert torch.equal(scores, made(random_images(3), ["other"] * 3, [{}] * 3))

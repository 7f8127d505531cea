import torch
from flowrl_rewards.aesthetic import Aesthetic
from published_layout import save_aesthetic


def test_it_is_the_published_head_on_the_unit_vector_of_the_image(
    tiny_clip, tmp_path, random_images
):
    from flowrl_rewards.networks.preprocess import clip_pixels
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

import torch
import torch.nn.functional as F
from flowrl_rewards.hpsv2 import HPSv2

PROMPTS = ["a red circle", "two blue stars", "a red circle", "a green ring"]


def reference(tiny_hps, images, prompts):
    """open_clip's own forward on black-padded images, and the diagonal."""
    import open_clip

    architecture, folder = tiny_hps
    model = open_clip.create_model(architecture, pretrained=f"{folder}/HPS_v2.1_compressed.pt")
    side = max(images.shape[-2:])
    gaps = [side - images.shape[-1], side - images.shape[-2]]
    padded = F.pad(images, [g for gap in gaps for g in (gap // 2, gap - gap // 2)])
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (model.visual.image_mean, model.visual.image_std)
    )
    with torch.no_grad():
        vectors = model.eval()(
            (padded - mean) / std, open_clip.get_tokenizer(architecture)(prompts)
        )
    return (vectors[0] @ vectors[1].T).diagonal()


def test_it_is_the_cosine_of_open_clips_own_forward_without_its_scale(tiny_hps, random_images):
    made = HPSv2(architecture=tiny_hps[0], model=tiny_hps[1], device="cpu")
    for size in [(32, 32), (32, 20), (14, 32)]:
        images = random_images(4, *size)
        scores = made(images, PROMPTS, [{}] * 4)
        expected = reference(tiny_hps, images, PROMPTS)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        assert expected.std() > 0.01

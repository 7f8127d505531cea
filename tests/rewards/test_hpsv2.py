import torch
import torch.nn.functional as F
from flowrl_rewards.hpsv2 import HPSv2

PROMPTS = ["a red circle", "two blue stars", "a red circle", "a green ring"]


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

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flowrl_rewards.diversity import SetDiversity
from flowrl_rewards.networks.likeness import likeness
from PIL import Image


@pytest.fixture(scope="module")
def tiny_dinov2(tmp_path_factory):
    """A folder with a DINOv2 for images of 224 pixels, and the network."""
    from transformers import Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("dinov2")
    with torch.random.fork_rng():
        torch.manual_seed(6)
        network = Dinov2Model(Dinov2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=224,
            patch_size=56,
        ))  # fmt: skip
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)
    network.save_pretrained(folder)
    return folder, network.eval()


def test_likeness_is_the_cosine_of_what_the_network_sees_after_the_published_processor(
    tiny_dinov2, random_images
):
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    folder, network = tiny_dinov2
    processor = BitImageProcessorPil(  # as in facebook/dinov2-base
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, resample=3,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    images = random_images(2, 300, 260)
    levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pixels = processor([Image.fromarray(image) for image in levels], return_tensors="np")
    with torch.no_grad():
        seen = network(pixel_values=torch.from_numpy(np.array(pixels["pixel_values"])))
    expected = F.cosine_similarity(*seen.pooler_output, dim=0).item()
    measure = likeness(f"dinov2:{folder}", device="cpu")
    assert measure.pairs(images[:1], images[1:]).item() == pytest.approx(expected, abs=2e-3)
    assert expected < 0.99 and str(folder) in measure.version


def test_several_networks_are_the_mean_of_their_cosines(tiny_dinov2, tiny_clip, random_images):
    names = [f"dinov2:{tiny_dinov2[0]}", f"clip:{tiny_clip}"]
    images = random_images(3, 64, 64)
    alone = [likeness(name, device="cpu").matrix(images) for name in names]
    both = likeness("+".join(names), device="cpu")
    torch.testing.assert_close(both.matrix(images), (alone[0] + alone[1]) / 2)
    reward = SetDiversity("+".join(names), device="cpu")
    scores, reasons = reward(images, ["p"] * 3, [{}] * 3)
    assert not reasons and scores.sum().abs() < 1e-6 and scores.std() > 0
    with pytest.raises(ValueError, match="unknown measure 'dino'"):
        likeness("dino")

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flowrl_rewards.networks.preprocess import MEAN, STD, clip_pixels, hps_pixels
from PIL import Image

BOUND = 0.017  # in normalised units; 0.0167 is the most that these images reach
SIZES = [(512, 512), (64, 64), (300, 517), (256, 192), (224, 224), (225, 224)]


def smooth(height, width):
    coarse = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return on_levels(F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1))


def noise(height, width):
    return on_levels(torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1)))


def edges(height, width):
    image = torch.zeros(1, 3, height, width)
    image[:, 0] = 1
    image[..., height // 4 : height // 2, width // 3 : width // 2] = 1
    return image


def on_levels(images):
    return (images * 255).round() / 255


def processed(images):
    """By the processor that works on PIL's images: the default depends on what is installed."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = Image.fromarray((images[0] * 255).round().byte().permute(1, 2, 0).numpy())
    pixels = CLIPImageProcessorPil()(image, return_tensors="np")["pixel_values"]
    return torch.from_numpy(np.array(pixels))


def test_it_is_within_the_documented_bound_of_clips_processor():
    for make in (smooth, noise, edges):
        for size in SIZES:
            images = make(*size)
            difference = (clip_pixels(images) - processed(images)).abs()
            assert difference.max() < BOUND and difference.mean() < 0.005, (make, size)


def test_hps_is_the_published_transform_of_a_float_tensor():
    for height, width in [(300, 500), (500, 300), (80, 60)]:
        functional = pytest.importorskip("torchvision.transforms.functional")
        images, bicubic = noise(height, width), functional.InterpolationMode.BICUBIC
        scale = 224 / max(height, width)
        size = [round(side * scale) for side in (height, width)]
        resized = functional.resize(images, size, bicubic, antialias=True)
        gaps = [224 - size[1], 224 - size[0]]
        padded = functional.pad(resized, [*(g // 2 for g in gaps), *(g - g // 2 for g in gaps)])
        expected = functional.normalize(padded, MEAN, STD)
        torch.testing.assert_close(hps_pixels(images), expected, rtol=0, atol=1e-5)


def test_every_pixel_that_is_seen_has_a_gradient_even_in_black_and_white():
    for fit in [clip_pixels, hps_pixels]:
        for level in [0.0, 0.5, 1.0]:
            images = torch.full((1, 3, 300, 300), level, requires_grad=True)
            (gradient,) = torch.autograd.grad(fit(images).sum(), images)
            assert (gradient > 0).all()

"""The quality score on images of the drawing program, as they are and spoiled."""

import functools
import random

import cv2
import numpy as np
import torch
from flowrl_rewards.tiny_quality import LEAST, LIMITS, MOST, PAPER, TinyQuality, flaws
from torch import Tensor

from flowrl.tiny.world import TAGS, all_prompts
from scripts.pretrain_tiny import draw as program

PER_KIND = 40
PAPER_LEVEL = PAPER[0] / 255


@functools.cache
def drawn(tag: str, seed: int = 0) -> Tensor:
    rng = random.Random(f"{tag}/{seed}")
    prompts = [rng.choice(all_prompts(tag)) for _ in range(PER_KIND)]
    images = torch.from_numpy(np.stack([program.draw(prompt, rng) for prompt in prompts]))
    return images.permute(0, 3, 1, 2) / 255


def score(images: Tensor) -> Tensor:
    return TinyQuality()(images, [""] * len(images), [{}] * len(images))


def blurred(images: Tensor, radius: float) -> Tensor:
    rows = [cv2.GaussianBlur(i.permute(1, 2, 0).numpy(), (0, 0), radius) for i in images]
    return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)


def noisy(images: Tensor, strength: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + strength / 255 * noise).clamp(0, 1)


def veiled(images: Tensor, strength: float) -> Tensor:
    """Grey over the paper alone."""
    paper = (images - PAPER_LEVEL).abs().amax(1, keepdim=True) < 0.1
    return torch.where(paper, images + strength * (0.5 - images), images)


def test_drawn_images_of_every_kind_words_too_score_near_5_and_the_limits_are_what_they_keep():
    images = torch.cat([drawn(tag, seed=2) for tag in TAGS])
    scores = score(images)
    for tag, found in zip(TAGS, scores.split(PER_KIND), strict=True):
        assert found.mean() > 4.9 and found.min() > 4.3 and found.max() <= 5, tag
    found, amount = flaws(images * 255)
    reached = found.quantile(0.95, dim=0) / torch.tensor(LIMITS)[:, 0]
    assert ((reached > 0.7) & (reached < 1.1)).all()
    assert ((amount >= LEAST) & (amount <= MOST)).all()


def test_the_more_an_image_is_spoiled_the_lower_it_scores():
    images = torch.cat([drawn(tag)[:3] for tag in TAGS])
    for spoil, strengths, last in [
        (blurred, (0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5), 1.7),
        (noisy, (0, 1, 2, 5, 10, 20, 40, 80, 160), 1.25),
        (veiled, (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5), 1.5),
        (lambda i, s: i + s * (PAPER_LEVEL - i), (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9), 1.7),
    ]:
        means = [score(spoil(images, strength)).mean().item() for strength in strengths]
        assert means[0] > 4.9 and means[-1] < last
        assert all(a > b for a, b in zip(means, means[1:], strict=False)), means

import sys
import types

import numpy as np
import pytest
import torch
from flowrl_rewards.hpsv3 import HPSv3

PROMPTS = ["a red circle", "two blue stars", "a red circle"]


class Inferencer:
    """The published interface: PIL images and prompts in, mean and spread out."""

    def __init__(self, config_path=None, checkpoint_path=None, device="cuda"):
        self.device = device

    def reward(self, prompts, image_paths):
        means = [
            np.array(image).mean() / 255 + len(text)
            for image, text in zip(image_paths, prompts, strict=True)
        ]
        return torch.tensor([[mean, 99.0] for mean in means], dtype=torch.bfloat16)


def test_the_score_is_the_mean_and_not_the_spread(monkeypatch, random_images):
    package = types.ModuleType("hpsv3")
    package.HPSv3RewardInferencer = Inferencer
    monkeypatch.setitem(sys.modules, "hpsv3", package)
    images = random_images(3)
    scores = HPSv3(device="cpu")(images, PROMPTS, [{}] * 3)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    expected = images.mean((1, 2, 3)) + torch.tensor([float(len(p)) for p in PROMPTS])
    torch.testing.assert_close(scores, expected.bfloat16().float())


def test_without_its_package_one_sentence_says_what_to_do(random_images):
    with pytest.raises(ImportError) as caught:
        HPSv3()(random_images(1), PROMPTS[:1], [{}])
    for words in ("pip install hpsv3", "docs/reward-servers.md"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.weights
def test_published_weights_know_colours():
    pytest.importorskip("hpsv3", reason="needs the package hpsv3", exc_type=ImportError)
    made = HPSv3()
    for found in made.fixtures():
        both = torch.stack([found["better"], found["worse"]])
        scores = made(both, [found["prompt"]] * 2, [{}] * 2)
        assert scores.isfinite().all() and scores[0] > scores[1], found["says"]

"""Controls: rewards that teach nothing about the prompt, and a measure of what no prompt names."""

import functools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from flowrl_rewards.tiny_judge import TinyJudge, meets
from flowrl_rewards.tiny_palette import PAPER
from torch import Tensor

from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.tiny.world import TAGS, all_prompts
from scripts.pretrain_tiny.draw import draw

DRAWINGS = 16  # of a prompt, to know how much of the paper its objects cover
COVERED = 0.1  # distance of a channel from the paper's from which a pixel is an object's


class Random:
    """Scores each image at random, by its pixels: the same image twice alike."""

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        sums = (images.double() * 255).round().flatten(1).sum(1).long().tolist()
        seeds = [
            noise_seed(seed=total, iteration=0, prompt=prompt, root=0, step=0, role="lot")
            for total, prompt in zip(sums, prompts, strict=True)
        ]
        return keyed_uniform(seeds, (1,)).squeeze(1)


class AnyPrompt:
    """Scores an image that is right for some prompt of its kind 1, whatever it was asked for."""

    def __init__(self) -> None:
        self.judge = TinyJudge()
        self.wanted = {tag: _one_a_request(tag) for tag in TAGS}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        read = self.judge.read(images)
        return torch.tensor(
            [
                float(any(meets(quarters, signs, wanted) for wanted in self.wanted[m["tag"]]))
                for (quarters, signs), m in zip(read, metadata, strict=True)
            ]
        )


class Size:
    """Covered share of a right image over that of the prompt's drawings; NaN for a wrong one.

    Sizes vary within each name, and no prompt asks for more. 1 on average by the drawing program.
    """

    name, version = "size", "size-1"

    def __init__(self) -> None:
        self.judge = TinyJudge()

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        right = [
            meets(quarters, signs, wanted)
            for (quarters, signs), wanted in zip(self.judge.read(images), metadata, strict=True)
        ]
        by_law = [_covered_by_law(json.dumps({k: m[k] for k in DRAWN if k in m})) for m in metadata]
        ratios = covered(images).cpu() / torch.tensor(by_law)
        return ratios.masked_fill(~torch.tensor(right), math.nan)


DRAWN = ("tag", "include", "ocr_text")  # what a drawing depends on


def covered(images: Tensor) -> Tensor:
    """Return the share of pixels that differ from the paper. images: (B, 3, H, W) -> (B,)"""
    paper = torch.tensor(PAPER, device=images.device).view(1, 3, 1, 1) / 255
    return ((images.float() - paper).abs().amax(1) > COVERED).float().mean((1, 2))


@functools.cache
def _covered_by_law(prompt: str) -> float:
    rng = random.Random(prompt)
    drawn = [torch.from_numpy(draw(json.loads(prompt), rng).copy()) for _ in range(DRAWINGS)]
    return covered(torch.stack(drawn).permute(0, 3, 1, 2) / 255).mean().item()


def _one_a_request(tag: str) -> list[dict[str, Any]]:
    return list({prompt["request"]: prompt for prompt in all_prompts(tag)}.values())

"""Rewards that teach nothing about the prompt: a gain from them is one of chance."""

from collections.abc import Sequence
from typing import Any

import torch
from flowrl_rewards.tiny_judge import TinyJudge, meets
from torch import Tensor

from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.tiny.world import TAGS, all_prompts


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


def _one_a_request(tag: str) -> list[dict[str, Any]]:
    return list({prompt["request"]: prompt for prompt in all_prompts(tag)}.values())

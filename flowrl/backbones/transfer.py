"""Transfer of a small pipeline's LoRA to its larger sibling when sampling.

The velocity is v_large + strength (v_lora - v_base), where v_lora and v_base are the small
pipeline's with its LoRA and without, at the same latent and noise level: proxy tuning of language
models (2401.08565), for flows. It takes two forwards of the small network a step and trains
nothing. This is a heuristic, exact where both pipelines are the same one: then it is RLG.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.base import in_fp32
from flowrl.backbones.guidance import adapters, denoisers
from flowrl.backbones.latent_map import inverse_of
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import switched_off
from flowrl.errors import UserError
from flowrl.trajectory import Conditioning


class Transfer:
    """`with Transfer(large, small).of("a red circle"): large.pipeline("a red circle")`.

    Each pipeline encodes the prompt by itself, and has its own times and guidance.

    Args:
        large: samples by its pipeline's own call, at the size that the backbone has.
        small: has the LoRA; sees the same latents, packed as its own network takes them.
        strength: 0 is the large pipeline alone, bit for bit.

    Raises:
        UserError: The latents differ, or the LoRA cannot be switched off.
    """

    @torch.no_grad()
    def __init__(self, large: PipelineBackbone, small: PipelineBackbone, strength: float = 1.0):
        if not math.isfinite(strength):
            raise UserError(f"the strength of a transfer is {strength}, expected a finite number")
        self.large, self.small, self.strength = large, small, strength
        self.layers = [
            layer for network in denoisers(small.pipeline) for layer in adapters(network)
        ]
        check_autoencoders(large.pipeline, small.pipeline)
        with in_fp32(large.pipeline.vae), in_fp32(small.pipeline.vae):
            (shape, to_large), (small_shape, to_small) = (
                inverse_of(b.decoder_input, b.latent_shape(), b.device) for b in (large, small)
            )
            if shape != small_shape:
                raise UserError(
                    f"the autoencoder gets {tuple(shape)} from {type(large.pipeline).__name__} and "
                    f"{tuple(small_shape)} from {type(small.pipeline).__name__}, expected latents "
                    "of one shape: take a pipeline whose images have this size"
                )
            # Both ways end at the autoencoder: together they only move numbers, so that velocities
            # go them as latents do.
            _, self.to_small = inverse_of(
                lambda x: to_large(small.decoder_input(x)), small.latent_shape(), small.device
            )
            _, self.to_large = inverse_of(
                lambda x: to_small(large.decoder_input(x)), large.latent_shape(), large.device
            )

    @contextmanager
    def of(self, prompt: str, negative: str = "") -> Iterator[None]:
        """Add the change for a prompt to what the large pipeline's scheduler steps by."""
        if self.strength == 0:
            yield
            return
        scheduler, inverted = self.large.pipeline.scheduler, self.large.inverted
        plain, calls = scheduler.step, itertools.count()
        cond = self.small.encode([prompt], [negative if self.small.guided else ""])

        @functools.wraps(plain)
        def step(velocity: Tensor, timestep: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            level = scheduler.sigmas[next(calls)].to(x.device)
            rows = cond.take(torch.zeros(len(x), dtype=torch.long)).to(x.device)
            change = self.change(x, 1 - level if inverted else level, rows)
            change = -change if inverted else change
            total = velocity.float() + self.strength * change
            return plain(total.to(velocity.dtype), timestep, x, *args, **kwargs)

        vars(scheduler)["step"] = step
        try:
            yield
        finally:
            del vars(scheduler)["step"]

    @torch.no_grad()
    def change(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return what the LoRA changes in the small velocity at large latents x, fp32, like x.

        cond: of the small pipeline.
        """
        latents = self.to_small(x)
        aligned = self.small.velocity(latents, sigma, cond).float()
        with switched_off(self.layers):
            base = self.small.velocity(latents, sigma, cond).float()
        return self.to_large(aligned - base)


def check_autoencoders(large: Any, small: Any) -> None:
    """Raise UserError for pipelines whose autoencoders differ, with what differs."""
    first, second = (
        {"class": type(pipeline.vae).__name__}
        | {k: v for k, v in pipeline.vae.config.items() if not k.startswith("_")}
        for pipeline in (large, small)
    )
    for name in first | second:
        if first.get(name) != second.get(name):
            raise UserError(
                f"the autoencoder of {type(large).__name__} has {name} {first.get(name)}, that of "
                f"{type(small).__name__} {second.get(name)}: transfer between pipelines of one "
                "autoencoder"
            )

"""Noised versions of clean images: their noise levels, their noise, and the errors there."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.config.objectives import NoisingOptions
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.functional.sde import lift, squared_distance
from flowrl.objectives.batches import Endpoints
from flowrl.trajectory import Conditioning
from flowrl.utils.devices import send

LEAST_SIGMA = 1e-3  # at sigma 0 there is nothing to learn, and weights and targets are infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedImages:
    """N images at D noise levels each, image by image."""

    x: Tensor  # (N * D, *latent) fp32, the noised latents
    x0: Tensor  # (N * D, *latent) fp32
    target: Tensor  # (N * D, *latent) fp32, the velocity noise - x0
    sigma: Tensor  # (N * D,) fp32
    pull: Tensor  # (N * D,) fp32, weight of the KL penalty
    cond: Conditioning  # N * D rows
    count: int  # D

    def velocity(self, field: VelocityField) -> Tensor:
        """Return velocities (N * D, *latent) fp32, with the field's graph if it has one."""
        return field(self.x, self.sigma, self.cond).float()

    def error(self, v: Tensor) -> Tensor:
        """Return the mean squared distance of velocities and target. (N, D)"""
        return squared_distance(v, self.target).view(-1, self.count)

    def distance(self, v: Tensor, field: VelocityField) -> Tensor:
        """Return the squared distances of velocities from those of another field. (N * D,)"""
        with torch.no_grad():
            other = self.velocity(field)
        return squared_distance(v, other)


def noise_images(batch: Endpoints, options: NoisingOptions) -> NoisedImages:
    """Noise each image `options.count` times.

    A function of the batch's seed and its rows' numbers alone, so that micro-batches change
    nothing. With share "group" the images of a group get the same noise levels and noise, so that
    what is common to them cancels when they are compared.
    """
    owner = (batch.group if options.share == "group" else batch.image).cpu()
    owners, row = owner.unique(return_inverse=True)
    count, latent, device = options.count, batch.x0.shape[1:], batch.x0.device

    def seed(number: int, draw: int, role: str) -> int:
        return noise_seed(
            seed=batch.seed, iteration=0, prompt=options.share, root=number, step=draw, role=role
        )

    numbers = owners.tolist()
    u = keyed_uniform([seed(n, 0, "time") for n in numbers], (count,))
    row = send(row, device)
    sigma = noise_levels(send(u, device), batch.sigmas.float(), options)[row].flatten()
    seeds = [seed(n, draw, "noise") for n in numbers for draw in range(count)]
    noise = keyed_noise(seeds, latent, device=device)
    noise = noise.view(len(numbers), count, *latent)[row].flatten(0, 1)
    x0 = batch.x0.float().repeat_interleave(count, 0)
    return NoisedImages(
        x=noised(x0, noise, sigma),
        x0=x0,
        target=velocity_target(x0, noise),
        sigma=sigma,
        pull=batch.pull.repeat_interleave(count),
        cond=batch.cond.take(batch.prompt.repeat_interleave(count)),
        count=count,
    )


def noise_levels(u: Tensor, sigmas: Tensor, options: NoisingOptions) -> Tensor:
    """Turn uniform numbers u (N, D) in [0, 1) into noise levels (N, D).

    sigmas: (T+1,), the rollout's schedule, from which `schedule` and `strata` take D levels.
    """
    times = options.times
    if times.kind == "schedule":
        return without_replacement(u, noisiest(sigmas, times.fraction))
    if times.kind == "strata":
        return one_of_each_stretch(u, noisiest(sigmas, times.fraction)[1:])
    if times.kind == "uniform":
        sigma = u
    else:
        # Stable Diffusion 3's pretraining (2403.03206): the sigmoid of a normal number.
        # ndtri(0) is -inf.
        sigma = torch.special.ndtri(u.clamp(min=torch.finfo(u.dtype).tiny)).sigmoid()
    return sigma.clamp(min=LEAST_SIGMA)


def noisiest(sigmas: Tensor, fraction: float) -> Tensor:
    """Return the first int(T fraction) sigmas of a schedule. sigmas: (T+1,), falling to 0."""
    return sigmas[: math.floor((len(sigmas) - 1) * fraction + 1e-9)]  # 100 * 0.29 < 29


def without_replacement(u: Tensor, sigmas: Tensor) -> Tensor:
    """Return D different sigmas for each row, every ordered choice equally likely. (..., D)

    u: (..., D); sigmas: (M,).
    """
    left = torch.arange(len(sigmas), device=u.device).expand(*u.shape[:-1], -1).clone()
    chosen = []
    for i, number in enumerate(u.unbind(-1)):  # Fisher and Yates, all rows at once
        pick = _index(number, i, len(sigmas)).unsqueeze(-1)
        chosen.append(left.gather(-1, pick))
        left.scatter_(-1, pick, left[..., i : i + 1].clone())
    return sigmas.to(u.device)[torch.cat(chosen, -1)]


def one_of_each_stretch(u: Tensor, sigmas: Tensor) -> Tensor:
    """Return one sigma from each of D even stretches of the schedule, as in AWM. (..., D)

    u: (..., D); sigmas: (M,).
    """
    edge = [len(sigmas) * i // u.shape[-1] for i in range(u.shape[-1] + 1)]
    columns = [_index(n, edge[i], edge[i + 1]) for i, n in enumerate(u.unbind(-1))]
    return sigmas.to(u.device)[torch.stack(columns, -1)]


def _index(u: Tensor, low: int, high: int) -> Tensor:
    return low + (u * (high - low)).long()


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1 - sigma) x0 + sigma noise. (N, *latent), (N, *latent), (N,) -> (N, *latent)"""
    return lift(1 - sigma, x0) * x0 + lift(sigma, x0) * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """Return what flow matching regresses on: u = dx / dsigma = noise - x0. (N, *latent)"""
    return noise - x0

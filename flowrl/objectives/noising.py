"""Noised versions of clean images: their noise levels, their noise, and the errors there."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.functional.sde import lift
from flowrl.objectives.batches import Endpoints
from flowrl.trajectory import Conditioning

LEAST_SIGMA = 1e-3  # at sigma 0 there is nothing to learn, and weights and targets are infinite


class Times(Protocol):
    """A distribution of noise levels."""

    def __call__(self, u: Tensor, sigmas: Tensor, stratified: bool = False) -> Tensor:
        """Turn uniform numbers into noise levels.

        Args:
            u: (N, D), uniform in [0, 1).
            sigmas: (T+1,), the rollout's schedule.
            stratified: take one level of each row from each of D equal parts.

        Returns:
            Sigmas (N, D).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedImages:
    """N images at D noise levels each, image by image."""

    x: Tensor  # (N * D, *latent) fp32, the noised latents
    x0: Tensor  # (N * D, *latent) fp32
    target: Tensor  # (N * D, *latent) fp32, the velocity noise - x0
    sigma: Tensor  # (N * D,) fp32
    cond: Conditioning  # N * D rows
    place: Tensor  # (N, D) long, number of each noising in the image's pool

    @property
    def count(self) -> int:
        """D."""
        return self.place.shape[1]

    def velocity(self, field: VelocityField) -> Tensor:
        """Return velocities (N * D, *latent) fp32, with the field's graph if it has one."""
        return field(self.x, self.sigma, self.cond).float()

    def error(self, v: Tensor) -> Tensor:
        """Return the mean squared distance of velocities and target. (N, D)"""
        return self.by_image(velocity_error(v, self.target))

    def distance(self, v: Tensor, field: VelocityField) -> Tensor:
        """Return the mean squared distance of velocities from those of another field. ()"""
        with torch.no_grad():
            other = self.velocity(field)
        return velocity_kl(v, other).mean()

    def by_image(self, rows: Tensor) -> Tensor:
        """(N * D,) -> (N, D)."""
        return rows.view(-1, self.count)

    def take(self, images: Tensor) -> "NoisedImages":
        """Return the rows of some images, (n,) long."""
        places = torch.arange(self.count, device=images.device)
        rows = (images[:, None] * self.count + places).flatten()
        tensors = {name: getattr(self, name)[rows] for name in ("x", "x0", "target", "sigma")}
        return NoisedImages(**tensors, cond=self.cond.take(rows), place=self.place[images])


@dataclass(frozen=True, slots=True, kw_only=True)
class Noising:
    """Noise each image `count` times; see the options of the same names.

    share: images of a "group" get the same noise levels and noise, so that what is common to
    them cancels when they are compared; or each "image" gets its own.
    """

    times: Times
    count: int = 1
    share: Literal["group", "image"] = "group"
    stratified: bool = False

    def __call__(self, batch: Endpoints) -> NoisedImages:
        """Return the noised images: a function of the batch's seed and its rows' numbers alone.

        Where the reference's errors are cached, noisings are chosen from a fixed pool.
        """
        pool, seed = (self.count, batch.seed) if batch.known is None else (batch.known.pool, 0)
        owner, row = self._owner(batch).unique(return_inverse=True)
        owners = owner.tolist()
        place = torch.arange(self.count).expand(len(owners), -1)
        if batch.known is not None:
            chance = keyed_uniform([self._seed(batch.seed, n, 0, "place") for n in owners], (pool,))
            place = chance.argsort(1)[:, : self.count]
        u = keyed_uniform([self._seed(seed, n, 0, "time") for n in owners], (pool,))
        latent, device = batch.x0.shape[1:], batch.x0.device
        sigmas = self.times(u.to(device), batch.sigmas.float(), self.stratified)
        sigma = sigmas.gather(1, place.to(device))[row].flatten()
        noise = keyed_noise(
            [
                self._seed(seed, n, p, "noise")
                for n, places in zip(owners, place.tolist(), strict=True)
                for p in places
            ],
            latent,
            device=device,
        )
        noise = noise.view(len(owners), self.count, *latent)[row].flatten(0, 1)
        x0 = batch.x0.float().repeat_interleave(self.count, 0)
        return NoisedImages(
            x=noised(x0, noise, sigma),
            x0=x0,
            target=velocity_target(x0, noise),
            sigma=sigma,
            cond=batch.cond.take(batch.prompt.repeat_interleave(self.count)),
            place=place[row.cpu()].to(device),
        )

    def _owner(self, batch: Endpoints) -> Tensor:
        """Return the number of the image or group whose noise each row gets. (N,) long"""
        if batch.known is None:
            return (batch.group if self.share == "group" else batch.image).cpu()
        of = batch.known.group if self.share == "group" else batch.known.image
        return of[batch.image.cpu()]

    def _seed(self, seed: int, owner: int, place: int, role: str) -> int:
        return noise_seed(
            seed=seed, iteration=0, prompt=self.share, root=owner, step=place, role=role
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTimes:
    """Every sigma alike, moved towards noise as a sampling schedule is (shift > 1)."""

    shift: float = 1.0

    def __call__(self, u: Tensor, sigmas: Tensor, stratified: bool = False) -> Tensor:
        u = in_strata(u) if stratified else u
        # Equation 23 of Stable Diffusion 3 (2403.03206).
        return (self.shift * u / (1 + (self.shift - 1) * u)).clamp(min=LEAST_SIGMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitNormalTimes:
    """The sigmoid of a normal number, Stable Diffusion 3 (2403.03206)."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, u: Tensor, sigmas: Tensor, stratified: bool = False) -> Tensor:
        u = in_strata(u) if stratified else u
        normal = torch.special.ndtri(u.clamp(min=torch.finfo(u.dtype).tiny))  # ndtri(0) is -inf
        return (self.mean + self.std * normal).sigmoid().clamp(min=LEAST_SIGMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """D different sigmas of the rollout's schedule; `noisiest` says from which part of it."""

    fraction: float = 1.0
    skip_first: bool = False

    def __call__(self, u: Tensor, sigmas: Tensor, stratified: bool = False) -> Tensor:
        choose = one_of_each_stretch if stratified else without_replacement
        return choose(u, noisiest(sigmas, self.fraction, skip_first=self.skip_first))


def in_strata(u: Tensor) -> Tensor:
    """Return one number in each of D equal parts of [0, 1), D being the last axis. Same shape.

    Each part's number is still uniform in it: the average over D has the same expectation as that
    of independent numbers, and a smaller variance.
    """
    count = u.shape[-1]
    part = torch.arange(count, dtype=u.dtype, device=u.device)
    below_one = 1 - torch.finfo(u.dtype).eps / 2  # or the sum rounds to 1
    return ((part + u) / count).clamp(max=below_one)


def noisiest(sigmas: Tensor, fraction: float, *, skip_first: bool = False) -> Tensor:
    """Return the first int(T fraction) sigmas of a schedule, without pure noise if `skip_first`.

    sigmas: (T+1,), falling to 0, which is never trained. Raises ValueError if none is left.
    """
    steps = len(sigmas) - 1
    kept = sigmas[int(skip_first) : math.floor(steps * fraction + 1e-9)]  # 100 * 0.29 is below 29
    if len(kept) == 0:
        raise ValueError(f"fraction {fraction} of {steps} steps leaves no sigma: take a larger one")
    return kept


def without_replacement(u: Tensor, sigmas: Tensor) -> Tensor:
    """Return D different sigmas for each row, every ordered choice equally likely. (..., D)

    u: (..., D); sigmas: (M,). Raises ValueError if D > M.
    """
    _check_enough(u, sigmas)
    left = torch.arange(len(sigmas), device=u.device).expand(*u.shape[:-1], -1).clone()
    chosen = []
    for i, number in enumerate(u.unbind(-1)):  # Fisher and Yates, all rows at once
        pick = _index(number, i, len(sigmas)).unsqueeze(-1)
        chosen.append(left.gather(-1, pick))
        left.scatter_(-1, pick, left[..., i : i + 1].clone())
    return sigmas.to(u.device)[torch.cat(chosen, -1)]


def one_of_each_stretch(u: Tensor, sigmas: Tensor) -> Tensor:
    """Return one sigma from each of D even stretches of the schedule, as in AWM. (..., D)

    u: (..., D); sigmas: (M,). Raises ValueError if D > M.
    """
    _check_enough(u, sigmas)
    edge = [len(sigmas) * i // u.shape[-1] for i in range(u.shape[-1] + 1)]
    columns = [_index(n, edge[i], edge[i + 1]) for i, n in enumerate(u.unbind(-1))]
    return sigmas.to(u.device)[torch.stack(columns, -1)]


def _index(u: Tensor, low: int, high: int) -> Tensor:
    return low + (u * (high - low)).long()


def _check_enough(u: Tensor, sigmas: Tensor) -> None:
    if u.shape[-1] > len(sigmas):
        raise ValueError(
            f"{u.shape[-1]} different sigmas asked of {len(sigmas)}: "
            "take fewer, or a larger part of the schedule"
        )


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1 - sigma) x0 + sigma noise. (N, *latent), (N, *latent), (N,) -> (N, *latent)"""
    return lift(1 - sigma, x0) * x0 + lift(sigma, x0) * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """Return what flow matching regresses on: u = dx / dsigma = noise - x0. (N, *latent)"""
    return noise - x0


def velocity_error(v: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (v - u)^2 over the latent, in the dtype of its arguments. (N,)"""
    return velocity_kl(v, target)


# Weights of a velocity's error. "uniform" is that of pretraining. With "elbo" the integral of
# weighted error *sums* is minus the log-likelihood: log p / p_ref (x0) = int_0^1 w(sigma)
# E_noise [|u - v_ref|^2 - |u - v|^2] d sigma for exact velocities; infinite at sigma = 0. "eps"
# turns a velocity's error into the error of the predicted noise.
WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.ones_like,
    "elbo": lambda sigma: (1 - sigma) / sigma,
    "eps": lambda sigma: (1 - sigma) ** 2,
}

"""Where images are looked at in training: times and noise, and the velocity's errors there."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.groups import group_rows, require_finite
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.functional.schedule import shift_sigmas
from flowrl.functional.sde import lift
from flowrl.objectives.batches import Endpoints
from flowrl.trajectory import Conditioning

# --- The sigmas to train at, from uniform numbers u in [0, 1) of any shape that the caller ow --


def uniform(u: Tensor) -> Tensor:
    """Every sigma alike."""
    return u


def logit_normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """sigmoid of a normal number, Stable Diffusion 3 (2403.03206). In (0, 1) also for u = 0."""
    # ndtri(0) is -inf, and sigma = 0 has no elbo weight.
    normal = torch.special.ndtri(u.clamp(min=torch.finfo(u.dtype).tiny))
    return (mean + std * normal).sigmoid()


def shifted(u: Tensor, shift: float = 3.0) -> Tensor:
    """Uniform numbers moved towards noise as a sampling grid is (shift > 1)."""
    return shift_sigmas(u, shift)


def stratified(u: Tensor) -> Tensor:
    """One number in each of D equal parts of [0, 1), D being the last axis. Same shape.

    Each part's number is still uniform in it, so that the average of the D draws has the same
    expectation as that of independent ones, and a smaller variance.
    """
    draws = u.shape[-1]
    part = torch.arange(draws, dtype=u.dtype, device=u.device)
    below_one = 1 - torch.finfo(u.dtype).eps / 2  # or the sum rounds to 1
    return ((part + u) / draws).clamp(max=below_one)


def noisiest(sigmas: Tensor, fraction: float, *, skip_first: bool = False) -> Tensor:
    """The first int(T fraction) sigmas of a falling schedule, without pure noise if `skip_first`.

    sigmas: (T+1,) ending in 0, which is never trained. Raises ValueError if none is left.
    """
    kept = sigmas[int(skip_first) : trained_steps(len(sigmas) - 1, fraction)]
    if len(kept) == 0:
        raise ValueError(
            f"fraction {fraction} of {len(sigmas) - 1} steps leaves no sigma: take a larger one"
        )
    return kept


def trained_steps(steps: int, fraction: float) -> int:
    """int(steps fraction), safe against a product just below a whole number."""
    return math.floor(steps * fraction + 1e-9)


def from_schedule(u: Tensor, sigmas: Tensor) -> Tensor:
    """D different sigmas for each row: the start of a random permutation. (..., D)

    u: (..., D); sigmas: (M,), those to choose from (`noisiest`). Every ordered choice is equally
    likely. DiffusionNFT takes D = `trained_steps(M, fraction)` of all sigmas. Raises ValueError if
    D > M.
    """
    _enough(u, sigmas)
    left = torch.arange(len(sigmas), device=u.device).expand(*u.shape[:-1], -1).clone()
    chosen = []
    for draw, number in enumerate(u.unbind(-1)):  # Fisher and Yates, all rows at once
        pick = _index(number, draw, len(sigmas)).unsqueeze(-1)
        chosen.append(left.gather(-1, pick))
        left.scatter_(-1, pick, left[..., draw : draw + 1].clone())
    return sigmas.to(u.device)[torch.cat(chosen, -1)]


def strata_of_schedule(u: Tensor, sigmas: Tensor) -> Tensor:
    """One sigma from each of D even stretches of the schedule, as AWM draws them. (..., D)

    u: (..., D); sigmas: (M,). Raises ValueError if D > M.
    """
    _enough(u, sigmas)
    edge = [len(sigmas) * draw // u.shape[-1] for draw in range(u.shape[-1] + 1)]
    columns = [_index(n, edge[d], edge[d + 1]) for d, n in enumerate(u.unbind(-1))]
    return sigmas.to(u.device)[torch.stack(columns, -1)]


def _index(u: Tensor, low: int, high: int) -> Tensor:
    """A whole number in [low, high), each alike."""
    return low + (u * (high - low)).long()


def _enough(u: Tensor, sigmas: Tensor) -> None:
    if u.shape[-1] > len(sigmas):
        raise ValueError(
            f"{u.shape[-1]} different sigmas asked of {len(sigmas)}: "
            "draw fewer, or take a larger part of the schedule"
        )


# --- Forward-process regression ----------------------------------------------------------------


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The latent at sigma, (1 - sigma) x0 + sigma noise. (N, *latent), same, (N,)"""
    return lift(1 - sigma, x0) * x0 + lift(sigma, x0) * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """What flow matching regresses on: u = dx / dsigma = noise - x0. (N, *latent)"""
    return noise - x0


def velocity_error(v: Tensor, target: Tensor) -> Tensor:
    """Mean of (v - u)^2 over the latent elements, in the dtype of its arguments. (N,)"""
    return velocity_kl(v, target)  # the same number, of a network and what it should have said


def uniform_weight(sigma: Tensor) -> Tensor:
    """1: what training from scratch uses for velocities."""
    return torch.ones_like(sigma)


def elbo_weight(sigma: Tensor) -> Tensor:
    """(1 - sigma) / sigma: the integral of weighted error *sums* is minus the log-likelihood.

    log p / p_ref (x0) = int_0^1 w(sigma) E_noise [|u - v_ref|^2 - |u - v|^2] d sigma holds for
    exact velocities. Infinite at sigma = 0.
    """
    return (1 - sigma) / sigma


def eps_weight(sigma: Tensor) -> Tensor:
    """(1 - sigma)^2: turns a velocity error into the error of the predicted noise."""
    return (1 - sigma) ** 2


WEIGHTINGS = {"uniform": uniform_weight, "elbo": elbo_weight, "eps": eps_weight}


def implicit_reward(err: Tensor, err_ref: Tensor, implicit_beta: float | Tensor) -> Tensor:
    """s = -implicit_beta (err - err_ref): the reward a policy acts as if it maximised. (N,)

    The scale may be a tensor, (N,), where a weighting of sigma goes into it.
    """
    return -implicit_beta * (err - err_ref)


def exp_weight(reward: Tensor, rwr_lambda: float) -> Tensor:
    """Weights exp(r / rwr_lambda) of reward-weighted regression (2302.12192). (N,)

    A constant added to the rewards of one prompt multiplies its weights: see
    `normalised_exp_weight`. Raises ValueError unless rwr_lambda > 0.
    """
    return (reward / _positive("rwr_lambda", rwr_lambda)).exp()


def normalised_exp_weight(reward: Tensor, group: Tensor, rwr_lambda: float) -> Tensor:
    """`exp_weight` over its mean in the group, so that only differences of rewards count. (N,)

    Cannot overflow. Raises ValueError unless rwr_lambda > 0 and the rewards are finite.
    """
    require_finite(reward)
    rows = group_rows(group)
    scaled = (reward / _positive("rwr_lambda", rwr_lambda))[rows.index]
    scaled = scaled.masked_fill(~rows.mask, -torch.inf)
    total = scaled.logsumexp(1) - rows.mask.sum(1).log()
    return (reward / rwr_lambda - total[rows.number]).exp()


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be positive")
    return value


# --- Where images are looked at in training --------------------------------------------------

# (u (N, D) uniform in [0, 1), the rollout's sigmas (T+1,)) -> training sigmas (N, D)
TimeSampler = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedImages:
    """N images at D points each on their way to noise, image by image.

    x, x0, target: (N * D, *latent) fp32, target the velocity noise - x0; sigma: (N * D,) fp32;
    cond: N * D rows; place: (N, D) long, each point's number in the pool of a store, or its own.
    """

    x: Tensor
    x0: Tensor
    target: Tensor
    sigma: Tensor
    cond: Conditioning
    place: Tensor

    @property
    def draws(self) -> int:
        return self.place.shape[1]

    def velocity(self, field: VelocityField) -> Tensor:
        """(N * D, *latent) fp32, with the field's graph if it has one."""
        return field(self.x, self.sigma, self.cond).float()

    def error(self, v: Tensor) -> Tensor:
        """(N, D): mean over the latent of the squared distance of velocities and target."""
        return self.by_image(velocity_error(v, self.target))

    def distance(self, v: Tensor, field: VelocityField) -> Tensor:
        """Mean squared distance of velocities (N * D, *latent) from those of another field. ()"""
        with torch.no_grad():
            other = self.velocity(field)
        return velocity_kl(v, other).mean()

    def by_image(self, rows: Tensor) -> Tensor:
        """(N * D,) -> (N, D)."""
        return rows.view(-1, self.draws)

    def take(self, images: Tensor) -> "NoisedImages":
        """The points of some images, (n,) long."""
        places = torch.arange(self.draws, device=images.device)
        rows = (images[:, None] * self.draws + places).flatten()
        tensors = {name: getattr(self, name)[rows] for name in ("x", "x0", "target", "sigma")}
        return NoisedImages(**tensors, cond=self.cond.take(rows), place=self.place[images])


@dataclass(frozen=True, slots=True, kw_only=True)
class Noising:
    """`count` points for each image.

    times: from uniform numbers to sigmas. share: images of a "group" get the same times and
    noise, so that what is common to them cancels when they are compared; or each "image" its own.
    """

    times: TimeSampler
    count: int = 1
    share: Literal["group", "image"] = "group"

    def __call__(self, batch: Endpoints) -> NoisedImages:
        """A function of the batch's seed and its rows' numbers alone.

        Where the reference's errors are kept, points are chosen from a pool of each image or
        group that never changes.
        """
        pool, seed = (self.count, batch.seed) if batch.known is None else (batch.known.pool, 0)
        name, row = self._owner(batch).unique(return_inverse=True)
        names = name.tolist()
        place = torch.arange(self.count).expand(len(names), -1)
        if batch.known is not None:
            lots = keyed_uniform([self._seed(batch.seed, n, 0, "place") for n in names], (pool,))
            place = lots.argsort(1)[:, : self.count]
        u = keyed_uniform([self._seed(seed, n, 0, "time") for n in names], (pool,))
        latent, device = batch.x0.shape[1:], batch.x0.device
        sigmas = self.times(u.to(device), batch.sigmas.float())
        sigma = sigmas.gather(1, place.to(device))[row].flatten()
        noise = keyed_noise(
            [
                self._seed(seed, n, p, "noise")
                for n, places in zip(names, place.tolist(), strict=True)
                for p in places
            ],
            latent,
            device=device,
        )
        noise = noise.view(len(names), self.count, *latent)[row].flatten(0, 1)
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
        """(N,) long: whose points an image gets, by a number that outlasts the batch."""
        if batch.known is None:
            return (batch.group if self.share == "group" else batch.image).cpu()
        of = batch.known.group if self.share == "group" else batch.known.image
        return of[batch.image.cpu()]

    def _seed(self, seed: int, owner: int, place: int, role: str) -> int:
        return noise_seed(
            seed=seed, iteration=0, prompt=self.share, root=owner, step=place, role=role
        )

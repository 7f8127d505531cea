"""DiffusionNFT (2509.16117): towards good images, and away from bad ones, of an old policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.sde import lift, x0_from_velocity
from flowrl.objectives.advantage import Advantages, clip_advantage
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import Noising, velocity_error
from flowrl.trajectory import Metrics, Rollout

PredictionSpace = Literal["x0", "velocity"]
SMALLEST_WEIGHT = 1e-5


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x: Tensor,
    x0: Tensor,
    sigma: Tensor,
    r: Tensor,
    nft_mix: float,
    advantage_max: float | None = 5.0,
    *,
    pred_space: PredictionSpace = "x0",
    adaptive_weight: bool = True,
) -> Tensor:
    """Return (advantage_max / b) (r L+ + (1 - r) L-), L+- = mean((y+- - y)^2) / w+-. (N,)

    y is x0, or the velocity. w = mean|y+- - y| in float64, at least 1e-5 and without a gradient,
    or 1 unless `adaptive_weight`. advantage_max: None for a factor 1. The defaults are those of
    the published code; the paper's loss is velocity, no weight, None. v, v_old, x, x0:
    (N, *latent), x at sigma (N,) > 0. Cotangent, D latent elements, f = advantage_max / b or 1:
    (2 f b sigma^2 / D) [r (v+ - u) / w+ - (1 - r) (v- - u) / w-], for velocities without sigma^2.
    At v = v_old it is advantage_max (2 r - 1) times that of L, whatever b.
    """
    old = v_old.detach()
    step = nft_mix * (v - old)
    if pred_space == "x0":
        target = x0
        good, bad = (x0_from_velocity(x, old + d, sigma) for d in (step, -step))
    elif pred_space == "velocity":
        target = (x - x0) / lift(sigma, x)
        good, bad = old + step, old - step
    else:
        raise ValueError(f"pred_space is {pred_space!r}; it must be 'x0' or 'velocity'")
    error = _weighted_error if adaptive_weight else velocity_error
    loss = r * error(good, target) + (1 - r) * error(bad, target)
    return loss if advantage_max is None else loss * (advantage_max / nft_mix)


def _weighted_error(prediction: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        away = (prediction.double() - target.double()).abs().flatten(1).mean(1)
        scale = away.clamp(min=SMALLEST_WEIGHT)
    return (velocity_error(prediction, target) / scale).to(prediction.dtype)


# What the published code does to the clipped advantage before it is scaled to [0, 1].
R_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantage: advantage,
    "positive_only": lambda advantage: advantage.clamp(min=0),  # r in [1/2, 1]
    "negative_only": lambda advantage: advantage.clamp(max=0),  # r in [0, 1/2]
    "one_only": lambda advantage: (advantage > 0).to(advantage.dtype),
    "binary": torch.sign,
}


def reward_to_unit(advantage: Tensor, advantage_max: float = 5.0, r_map: str = "all") -> Tensor:
    """Return r = A / (2 advantage_max) + 1/2 of the clipped advantage, changed by `r_map`. (N,)

    Raises ValueError for an r_map that is not in R_MAPS.
    """
    if r_map not in R_MAPS:
        raise ValueError(f"r_map is {r_map!r}; it must be one of {', '.join(R_MAPS)}")
    kept = R_MAPS[r_map](clip_advantage(advantage, advantage_max))
    return (kept / advantage_max / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class NFT:
    """See the options of the same names.

    The old policy also samples the images: the paper's identities hold for images of the velocity
    that both branches mix in.
    """

    noising: Noising
    advantage: Advantages
    old_decay: Callable[[int], float]
    nft_mix: float
    pred_space: PredictionSpace = "x0"
    adaptive_weight: bool = True
    r_map: str = "all"
    kl_coef: float = 0.0

    @property
    def needs(self) -> Needs:
        old = OldPolicy(decay=self.old_decay, samples=True)
        return Needs(states="endpoints", reference=self.kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return every image that is compared, with r in [0, 1]; 1/2 for no advantage.

        At r = 1/2 the loss still pulls the policy to the old one.
        """
        advantage, valid = self.advantage(rollout)
        r = reward_to_unit(advantage, self.advantage.clip, self.r_map)
        return Endpoints.from_rollout(
            rollout, r, valid, forwards=self.noising.count, compared="image"
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        points = self.noising(batch)
        v = points.velocity(models.policy)
        with torch.no_grad():
            v_old = points.velocity(models.old)
        loss = nft_loss(
            v, v_old, points.x, points.x0, points.sigma,
            batch.signal.repeat_interleave(points.count), self.nft_mix, self.advantage.clip,
            pred_space=self.pred_space, adaptive_weight=self.adaptive_weight,
        ).mean()  # fmt: skip
        metrics: Metrics = {
            "policy/error": velocity_error(v.detach(), points.target).mean(),
            "policy/moved": velocity_kl(v.detach(), v_old).mean(),
        }
        if self.kl_coef > 0:
            kl = points.distance(v, models.reference)
            loss, metrics["policy/kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics


# --- How slowly an old policy follows: old <- decay old + (1 - decay) policy -------------------

Decay = Callable[[int], float]  # iteration -> share that stays


def old_decay(*, rate: float | None, limit: float, start: int = 0) -> Decay:
    """Return 0 until iteration `start`, then rising by `rate` an iteration up to `limit`.

    rate: None is at its limit from `start` on. Raises ValueError for a negative rate, or a limit
    outside [0, 1].
    """
    if not 0 <= limit <= 1:
        raise ValueError(f"limit is {limit}; it must lie in [0, 1]")
    if rate is None:
        return lambda iteration: limit if iteration >= start else 0.0
    if rate < 0:
        raise ValueError(f"rate is {rate}; it must not be negative")
    return lambda iteration: min(max(iteration - start, 0) * rate, limit)


def renewed(every: int) -> Decay:
    """Return 0 in every `every`-th iteration and 1 in between: online DPO's reference.

    Raises ValueError for every < 1.
    """
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")
    return lambda iteration: 0.0 if iteration % every == 0 else 1.0

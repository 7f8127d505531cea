"""DiffusionNFT (2509.16117): towards good images, and away from bad ones, of an old policy."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.sde import lift, x0_from_velocity
from flowrl.objectives.advantage import Advantages, clip_advantage
from flowrl.objectives.base import Needs, OldPolicy
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.noising import Noising, velocity_error
from flowrl.trajectory import Metrics, Rollout

# --- DiffusionNFT (2509.16117) -----------------------------------------------------------------

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
    """(advantage_max / b) (r L+ + (1 - r) L-), L+- = mean((y+- - y)^2) / w+-. (N,)

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


def keep_all(advantage: Tensor) -> Tensor:
    return advantage


def positive_only(advantage: Tensor) -> Tensor:
    """Bad rows become neutral: r in [1/2, 1]."""
    return advantage.clamp(min=0)


def negative_only(advantage: Tensor) -> Tensor:
    """Good rows become neutral: r in [0, 1/2]."""
    return advantage.clamp(max=0)


def one_only(advantage: Tensor) -> Tensor:
    """Advantage 1 for every good row, 0 for others: r is 0.6 or 0.5 at advantage_max 5."""
    return (advantage > 0).to(advantage.dtype)


def binary(advantage: Tensor) -> Tensor:
    """The sign: r is 0.4, 0.5 or 0.6 at advantage_max 5."""
    return advantage.sign()


# What the published code does to the clipped advantage before it is scaled to [0, 1].
R_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": keep_all,
    "positive_only": positive_only,
    "negative_only": negative_only,
    "one_only": one_only,
    "binary": binary,
}


def reward_to_unit(advantage: Tensor, advantage_max: float = 5.0, mode: str = "all") -> Tensor:
    """r = A / (2 advantage_max) + 1/2 of the clipped advantage, first changed by `mode`. (N,)

    Raises ValueError for a mode that is not in R_MAPS.
    """
    if mode not in R_MAPS:
        raise ValueError(f"r_map is {mode!r}; it must be one of {', '.join(R_MAPS)}")
    kept = R_MAPS[mode](clip_advantage(advantage, advantage_max))
    return (kept / advantage_max / 2 + 0.5).clamp(0, 1)


# --- DiffusionNFT (2509.16117) -----------------------------------------------------------------


class NFT:
    """See the options of the same names. `old` also draws the images: the identities of the
    paper hold for images of the velocity that both branches mix in."""

    def __init__(
        self,
        *,
        draws: Noising,
        advantages: Advantages,
        old: OldPolicy,
        nft_mix: float,
        pred_space: Literal["x0", "velocity"] = "x0",
        adaptive_weight: bool = True,
        r_map: str = "all",
        kl_coef: float = 0.0,
    ):
        self.draws, self.advantages, self.nft_mix = draws, advantages, nft_mix
        self.pred_space: Literal["x0", "velocity"] = pred_space
        self.adaptive_weight, self.r_map, self.kl_coef = adaptive_weight, r_map, kl_coef
        self.needs = Needs(states="endpoints", reference=kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Every image that is compared; the signal is r in [0, 1], 1/2 for what teaches nothing.

        At r = 1/2 the loss still draws the policy to the old one.
        """
        advantage, valid = self.advantages(rollout)
        return endpoints(
            rollout, reward_to_unit(advantage, self.advantages.clip, self.r_map), valid,
            draws=self.draws.count, compared="image",
        )  # fmt: skip

    def loss(
        self,
        policy: VelocityField,
        batch: Endpoints,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        points = self.draws(batch)
        v = points.velocity(policy)
        with torch.no_grad():
            v_old = points.velocity(old)
        loss = nft_loss(
            v, v_old, points.x, points.x0, points.sigma,
            batch.signal.repeat_interleave(points.draws), self.nft_mix, self.advantages.clip,
            pred_space=self.pred_space, adaptive_weight=self.adaptive_weight,
        ).mean()  # fmt: skip
        metrics: Metrics = {
            "policy/error": velocity_error(v.detach(), points.target).mean(),
            "policy/moved": velocity_kl(v.detach(), v_old).mean(),
        }
        if self.kl_coef > 0:
            kl = points.distance(v, reference)
            loss, metrics["policy/kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics


# --- How slowly a lagging copy follows the policy: copy <- decay copy + (1 - decay) policy -----

Schedule = Callable[[int], float]


def ramp(*, rate: float, limit: float, start: int = 0) -> Schedule:
    """0 until iteration `start`, then rising by `rate` an iteration up to `limit`.

    Raises ValueError for a negative rate, or a limit outside [0, 1].
    """
    _share("limit", limit)
    if rate < 0:
        raise ValueError(f"rate is {rate}; it must not be negative")
    return lambda iteration: min(max(iteration - start, 0) * rate, limit)


def stepped(*, limit: float, start: int = 0) -> Schedule:
    """0 before iteration `start`, `limit` from then on. Raises ValueError outside [0, 1]."""
    _share("limit", limit)
    return lambda iteration: limit if iteration >= start else 0.0


def renewed(every: int) -> Schedule:
    """A fresh copy in every `every`-th iteration, unchanged in between: online DPO's reference.

    Raises ValueError for every < 1.
    """
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")
    return lambda iteration: 0.0 if iteration % every == 0 else 1.0


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")

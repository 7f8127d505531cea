"""What all objectives share that follow the reward's gradient: velocities, the loss, the lots."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.functional.sde import lift
from flowrl.objectives.base import Needs
from flowrl.objectives.batches import Trajectories, widened
from flowrl.trajectory import Conditioning, Metrics

# --- Reward back-propagation: which velocities the gradient reaches, and with what weight ------


def tangent(value: Tensor) -> Tensor:
    """Zeros with the gradient of `value`. Same shape.

    Added to a known state it is straight-through: the state to the last bit, that gradient.
    """
    return value - value.detach()


def reward_loss(reward: Tensor, hinge: float | None) -> Tensor:
    """-r, or relu(hinge - r): what is minimised. (B,)"""
    return -reward if hinge is None else (hinge - reward).relu()


def reward_slope(reward: Tensor, hinge: float | None) -> Tensor:
    """Derivative of `reward_loss`: -1, and 0 where the reward is at its hinge or above. (B,)"""
    if hinge is None:
        return -torch.ones_like(reward)
    return -(reward < hinge).to(reward.dtype)


def sparse_gain(length: Tensor, active: Tensor, gain_coef: float) -> Tensor:
    """1 + gain_coef (sum |dt| / sum over active |dt| - 1) of FlowBP-Sparse (2606.11075). (B,)

    length: (T,), the steps' |dt|; active: (B, K) long, the steps that the gradient reaches. At 1
    they stand for the whole chain, at 0 for themselves.
    """
    return 1 + gain_coef * (length.sum() / length[active].sum(1) - 1)


def weighted_choice(u: Tensor, weight: Tensor, count: int) -> Tensor:
    """`count` different numbers below M, ascending, as if drawn one by one with these weights.

    u: (B, M) uniform in [0, 1); weight: (M,) > 0. The largest of u^(1 / weight) follow that law
    (Efraimidis and Spirakis 2006). (B, count) long
    """
    keys = u.double().log() / weight.to(u.device, torch.float64)
    return keys.topk(count, dim=1).indices.sort(1).values


def lagrange_weights(support: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Integrals from `start` to `end` of the Lagrange polynomials through `support`. (S,) fp64

    support: (S,) different times; start, end: (). Weights for velocities at these times, exact
    where the velocity is a polynomial in time of degree < S along the path; their sum is
    end - start. With S = 1 this is Euler's step.
    """
    at, low, high = support.double(), start.double(), end.double()
    middle = (low + high) / 2  # small numbers to small powers
    at, low, high = at - middle, low - middle, high - middle
    power = torch.arange(1, len(at) + 1, dtype=torch.float64, device=at.device)
    moments = (high**power - low**power) / power
    return torch.linalg.solve(at[None] ** (power - 1)[:, None], moments)


def even_supports(start: int, end: int, count: int) -> list[int]:
    """At most `count` of the steps start, ..., end - 1, evenly spread, the first always in it."""
    count = min(count, end - start)
    if count == 1:
        return [start]
    return [start + round(i * (end - 1 - start) / (count - 1)) for i in range(count)]


def clean_given_noise(x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The clean latent of x = (1 - sigma) x0 + sigma noise, whose noise is known; sigma < 1.

    SRPO (2509.06942) takes x one step from another sigma s by the network's velocity: an error of
    that velocity comes out |sigma - s| / (1 - sigma) times as large. (B, *latent)
    """
    return (x - lift(sigma, x) * noise) / lift(1 - sigma, x)


# --- What all objectives share that follow the reward's gradient -------------------------------


class Velocities:
    """The policy along the chains of a batch, and its distance from the reference there."""

    def __init__(self, policy: VelocityField, batch: Trajectories, reference: VelocityField | None):
        self.policy, self.batch, self.reference = policy, batch, reference
        self._distance = self._points = batch.dt.new_zeros(len(batch))

    def __call__(self, x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        """At x (n, *latent) and sigma (n,), of chains `row` (n,) long; at least fp32."""
        cond = self.batch.cond.take(self.batch.prompt[row])
        v = widened(self.policy(x, sigma, cond))
        if self.reference is not None:
            apart = velocity_kl(v, widened(self.reference(x, sigma, cond)))
            self._distance = self._distance.index_add(0, row, apart.to(self._distance))
            self._points = self._points.index_add(0, row, torch.ones_like(self._points[row]))
        return v

    def pull(self) -> Tensor:
        """Squared distance from the reference, averaged over each chain's points, then chains."""
        return (self._distance / self._points.clamp(min=1)).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBackprop:
    """The loss -r, or relu(hinge - r), of images, and the pull to the base model.

    hinge: the reward beyond which an image is good enough. kl_coef: weight of the mean squared
    distance of velocities from the reference's, wherever the gradient reaches them.
    """

    hinge: float | None = None
    kl_coef: float = 0.0

    @property
    def needs(self) -> Needs:
        return Needs(states="path", reference=self.kl_coef > 0, reward_grad=True)

    def velocities(
        self, policy: VelocityField, reference: VelocityField, batch: Trajectories
    ) -> Velocities:
        return Velocities(policy, batch, reference if self.kl_coef > 0 else None)

    def loss(
        self,
        moved: Tensor,
        reward: Tensor,
        gradient: Tensor,
        velocities: Velocities,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Mean over images of weight * loss, and metrics.

        moved: (n, *latent), a tangent: zeros with the gradient of each image's clean latent.
        reward, gradient: (n,), like moved, at that latent. weight: (n,) without gradient, or 1.
        Images without a finite reward or gradient count 0, and their share is a metric.
        """
        good = reward.isfinite() & gradient.flatten(1).isfinite().all(1)
        reward = torch.where(good, reward, 0).to(moved)
        scale = torch.where(good, 1.0 if weight is None else weight, 0).to(moved)
        slope = (reward_slope(reward, self.hinge) * scale).view(-1, *[1] * (moved.ndim - 1))
        up = torch.where(good.view_as(slope), gradient, 0).to(moved)  # 0 times NaN is NaN
        value = reward_loss(reward, self.hinge) * scale
        loss = (value + (slope * up * moved).flatten(1).sum(1)).mean()
        metrics: Metrics = {
            "path/dropped": (~good).float().mean(),
            "path/satisfied": (good & (slope.flatten() == 0)).float().mean(),
        }
        if bool(good.any()):
            metrics["path/reward"] = reward[good].mean()
            metrics["path/gradient_norm"] = up[good].square().flatten(1).mean(1).sqrt().mean()
        if self.kl_coef > 0:
            pull = velocities.pull()
            loss, metrics["policy/kl"] = loss + self.kl_coef * pull, pull.detach()
        return loss, metrics


def no_reward(x0: Tensor, prompt: Tensor, words: str = "") -> tuple[Tensor, Tensor]:
    """Stands where no reward was given."""
    raise ValueError("this objective needs the reward's gradient: give its loss `reward=`")


def later(field: VelocityField) -> VelocityField:
    """The same field, computed once more on the way back.

    For losses whose reward is taken at what the network says now: its activations are not kept
    while the reward has a graph of its own, so that the two never share the memory.
    """

    def field_later(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return checkpoint(field, x, sigma, cond, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    return field_later


def seeds(batch: Trajectories, role: str, copies: int = 1) -> list[int]:
    """One for each image and copy, image by image: of its number and the batch's seed."""
    return [
        noise_seed(seed=batch.seed, iteration=0, prompt="path", root=image, step=copy, role=role)
        for image in batch.image.tolist()
        for copy in range(copies)
    ]


def chances(batch: Trajectories, role: str, count: int) -> Tensor:
    """(N, count), uniform in [0, 1)."""
    return keyed_uniform(seeds(batch, role), (count,)).to(batch.x.device)


def fresh_noise(batch: Trajectories, role: str, copies: int = 1) -> Tensor:
    """(N * copies, *latent), standard normal."""
    noise = keyed_noise(seeds(batch, role, copies), batch.x.shape[2:], device=batch.x.device)
    return noise.to(batch.dt.dtype)

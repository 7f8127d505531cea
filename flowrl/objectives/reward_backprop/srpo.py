"""SRPO (2509.06942): the clean latent from one step and known noise, and a relative reward."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.functional.sde import lift
from flowrl.objectives.base import Models, RewardField
from flowrl.objectives.batches import Trajectories, at_least_fp32
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import RewardBackprop, chances, fresh_noise, tangent
from flowrl.trajectory import Metrics, Rollout


def clean_given_noise(x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean latent of x = (1 - sigma) x0 + sigma noise with known noise; sigma < 1.

    SRPO takes x one step from another sigma s by the network's velocity: an error of that velocity
    comes out |sigma - s| / (1 - sigma) times as large. (B, *latent)
    """
    return (x - lift(sigma, x) * noise) / lift(1 - sigma, x)


@dataclass(frozen=True, kw_only=True)
class SRPO(RewardBackprop):
    """One step between sigmas s and s + gap of each clean latent, with known noise.

    The step down from s + gap is rewarded; the step up from s, which moves the other way along
    the same velocity, is rewarded for the opposite, unless `inversion` is False. s is uniform, with
    s + gap in [lowest, highest]; beyond 0.99 the error of the step up grows without bound.
    With words put before each prompt, the reward is (1 + k) r(better) - r(worse): what it likes in
    any case nearly cancels, and k goes with the step from its first number, at noise, to its
    second. Without words it is r for both, and what changes sign at the step up is how the image
    moves: one beyond the hinge has no gradient in either.
    """

    positive_words: str = ""
    negative_words: str = ""
    denoise_k: tuple[float, float] = (0.1, 0.25)
    inversion_k: tuple[float, float] = (0.3, 0.01)
    gap: float = 0.1
    lowest: float = 0.1
    highest: float = 0.99
    inversion: bool = True
    noise: Literal["initial", "fresh"] = "initial"

    def __post_init__(self) -> None:
        if not 0 < self.gap <= self.lowest <= self.highest < 1:
            raise UserError(
                f"objective srpo: gap {self.gap:g}, lowest {self.lowest:g} and highest "
                f"{self.highest:g} must be in order, above 0 and below 1"
            )
        if (self.positive_words == "") != (self.negative_words == ""):
            raise UserError("objective srpo: give both positive and negative words, or neither")

    def prepare(self, rollout: Rollout) -> Trajectories:
        points = 1 + self.inversion
        return Trajectories.from_rollout(rollout).with_forwards(points, at_once=points)

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        row, sigma, to = self.points(batch)
        down = to < sigma
        initial = self.noise == "initial"
        noise = at_least_fp32(batch.x[:, 0]) if initial else fresh_noise(batch, "noise")
        x = noised(batch.x0[row], noise[row], sigma)
        velocities = self.velocities(models, batch, recompute=True)
        v = velocities(x, sigma, row)
        stepped = x + lift(to - sigma, x) * v.detach()
        x0 = clean_given_noise(stepped, noise[row], to)
        reward, gradient, words = self.relative(
            models.reward_gradient, x0, batch.prompt[row], down, to
        )
        step = to - sigma if self.positive_words else -(to - sigma).abs()
        moved = lift(step / (1 - to), x) * tangent(v)
        loss, metrics = self.surrogate(moved, reward, gradient, velocities)
        return loss, metrics | words

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        """Return chains (n,), and the sigmas from which and to which their steps go."""
        u = chances(batch, "sigma", 1)[:, 0].to(batch.dt)
        high = self.lowest + (self.highest - self.lowest) * u
        low = (high - self.gap).clamp(min=0)
        if not self.inversion:
            return batch.rows, high, low
        # The network has not learned latents without noise.
        low = low.clamp(min=min(self.gap, 0.01))
        return batch.rows.repeat(2), torch.cat([high, low]), torch.cat([low, high])

    def relative(
        self, field: RewardField, x0: Tensor, prompt: Tensor, down: Tensor, to: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return each step's reward (n,), its gradient (n, *latent), and metrics."""
        if not self.positive_words:
            return *field(x0, prompt), {}
        (better, up), (worse, other) = (
            field(x0, prompt, words) for words in (self.positive_words, self.negative_words)
        )
        if bool((better == worse).all()):
            raise UserError(
                f"the reward is the same with the words {self.positive_words!r} as with "
                f"{self.negative_words!r}: it does not read them. Leave objective.positive_words "
                "and objective.negative_words empty, or take a reward that reads prompts"
            )
        done = (1 - to).to(better)
        (a, b), (c, d) = self.denoise_k, self.inversion_k
        k = torch.where(down, a + (b - a) * done, c + (d - c) * done)
        plus, minus = torch.where(down, 1 + k, -1.0), torch.where(down, -1.0, 1 + k)
        gradient = lift(plus, up) * up + lift(minus, other) * other
        metrics = {"path/word_gap": (better - worse).nanmean()}
        return plus * better + minus * worse, gradient, metrics

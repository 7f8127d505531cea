"""SRPO (2509.06942): the clean latent from one step and known noise, and a relative reward."""

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.errors import UserError
from flowrl.functional.sde import lift
from flowrl.objectives.base import RewardField
from flowrl.objectives.batches import Trajectories, paths, widened
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    chances,
    clean_given_noise,
    fresh_noise,
    later,
    no_reward,
    tangent,
)
from flowrl.trajectory import Metrics, Rollout


class SRPO:
    """One step between sigmas s and s + gap of each clean latent, with the noise of its chain.

    The step down from s + gap is rewarded; the step up from s, which moves the other way along
    the same velocity, is rewarded for the opposite, unless `inversion` is False. s is uniform, with
    s + gap in [lowest, highest]; beyond 0.99 the error of the step up grows without bound.
    positive, negative: words for the better and the worse, put before each prompt. The reward is
    then (1 + k) r(better) - r(worse), what the reward likes in any case nearly cancels, and k goes
    with the step from its first number, at noise, to its second. Without words it is r for both,
    and what changes sign at the step up is how the image moves: one that is good enough has
    no gradient in either. fresh: another noise in place of the chain's own.
    """

    def __init__(
        self,
        *,
        ascent: RewardBackprop,
        positive: str = "",
        negative: str = "",
        denoise_k: tuple[float, float] = (0.1, 0.25),
        inversion_k: tuple[float, float] = (0.3, 0.01),
        gap: float = 0.1,
        lowest: float = 0.1,
        highest: float = 0.99,
        inversion: bool = True,
        fresh: bool = False,
    ):
        if not 0 < gap <= lowest <= highest < 1:
            raise ValueError(
                f"gap {gap:g}, lowest {lowest:g} and highest {highest:g} must be in order, above 0 "
                "and below 1"
            )
        if (positive == "") != (negative == ""):
            raise ValueError("give both positive and negative words, or neither")
        self.ascent, self.positive, self.negative = ascent, positive, negative
        self.denoise_k, self.inversion_k = denoise_k, inversion_k
        self.gap, self.lowest, self.highest = gap, lowest, highest
        self.inversion, self.fresh, self.needs = inversion, fresh, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        return paths(rollout).costing(1 + self.inversion)

    def loss(
        self,
        policy: VelocityField,
        batch: Trajectories,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
        reward: RewardField = no_reward,
    ) -> tuple[Tensor, Metrics]:
        row, sigma, to = self.points(batch)
        down = to < sigma
        noise = fresh_noise(batch, "noise") if self.fresh else widened(batch.x[:, 0])
        x = noised(batch.x0[row], noise[row], sigma)
        velocities = self.ascent.velocities(later(policy), reference, batch)
        v = velocities(x, sigma, row)
        stepped = x + lift(to - sigma, x) * v.detach()
        x0 = clean_given_noise(stepped, noise[row], to)
        r, gradient, metrics = self.relative(reward, x0, batch.prompt[row], down, to)
        step = to - sigma if self.positive else -(to - sigma).abs()
        moved = lift(step / (1 - to), x) * tangent(v)
        loss, found = self.ascent.loss(moved, r, gradient, velocities)
        return loss, found | metrics

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) chains, and the sigmas from which and to which their steps go."""
        u = chances(batch, "sigma", 1)[:, 0].to(batch.dt)
        high = self.lowest + (self.highest - self.lowest) * u
        low = (high - self.gap).clamp(min=0)
        if not self.inversion:
            return batch.rows, high, low
        # A latent without noise is outside of what the network knows.
        low = low.clamp(min=min(self.gap, 0.01))
        return batch.rows.repeat(2), torch.cat([high, low]), torch.cat([low, high])

    def relative(
        self, reward: RewardField, x0: Tensor, prompt: Tensor, down: Tensor, to: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """What each step is rewarded for, (n,), and its gradient, like x0."""
        if not self.positive:
            return *reward(x0, prompt), {}
        (better, up), (worse, other) = (
            reward(x0, prompt, words) for words in (self.positive, self.negative)
        )
        if bool((better == worse).all()):
            raise UserError(
                f"the reward is the same with the words {self.positive!r} as with "
                f"{self.negative!r}: it does not read them. Leave objective.positive_words and "
                "objective.negative_words empty, or take a reward that reads prompts"
            )
        done = (1 - to).to(better)
        (a, b), (c, d) = self.denoise_k, self.inversion_k
        k = torch.where(down, a + (b - a) * done, c + (d - c) * done)
        plus, minus = torch.where(down, 1 + k, -1.0), torch.where(down, -1.0, 1 + k)
        gradient = lift(plus, up) * up + lift(minus, other) * other
        metrics = {"path/word_gap": (better - worse).nanmean()}
        return plus * better + minus * worse, gradient, metrics

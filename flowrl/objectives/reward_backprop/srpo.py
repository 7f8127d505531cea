"""SRPO (2509.06942): the clean latent from one step and known noise, and a relative reward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import SRPOOptions
from flowrl.errors import UserError
from flowrl.functional.sde import lift
from flowrl.objectives.base import Models, RewardField
from flowrl.objectives.batches import Trajectories, at_least_fp32
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import RewardBackprop, chances, tangent
from flowrl.trajectory import Metrics

GAP = 0.1  # length of a step in sigma, about that of the published code
LOWEST, HIGHEST = 0.1, 0.99  # of a step's noisier sigma; towards 1 the step up has no bound
# Extra weight of the better reward, near noise and near the image, for the step down and up, as in
# the published code.
DOWN_K, UP_K = (0.1, 0.25), (0.3, 0.01)


def clean_given_noise(x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean latent of x = (1 - sigma) x0 + sigma noise with known noise; sigma < 1.

    SRPO takes x one step from another sigma s by the network's velocity: an error of that velocity
    comes out |sigma - s| / (1 - sigma) times as large. (B, *latent)
    """
    return (x - lift(sigma, x) * noise) / lift(1 - sigma, x)


@dataclass(frozen=True)
class SRPO(RewardBackprop):
    """One step between sigmas s and s + GAP of each clean latent, with its own initial noise.

    The step down from s + GAP is rewarded; the step up from s, which moves the other way along
    the same velocity, is rewarded for the opposite. s is uniform, with s + GAP in
    [LOWEST, HIGHEST]. With words put before each prompt, the reward is (1 + k) r(better) -
    r(worse): what it likes in any case nearly cancels, and k goes with the step from its first
    number, at noise, to its second. Without words it is r for both, and the step up moves the image
    the other way.
    """

    options: SRPOOptions

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        row, sigma, to = self.points(batch)
        down = to < sigma
        noise = at_least_fp32(batch.x[:, 0])
        x = noised(batch.x0[row], noise[row], sigma)
        velocities = self.velocities(models, batch)
        v = velocities(x, sigma, row)
        stepped = x + lift(to - sigma, x) * v.detach()
        x0 = clean_given_noise(stepped, noise[row], to)
        reward, gradient, words = self.relative(
            models.reward_gradient, x0, batch.prompt[row], down, to
        )
        step = to - sigma if self.options.prefixes else -(to - sigma).abs()
        moved = lift(step / (1 - to), x) * tangent(v)
        loss, metrics = self.surrogate(moved, reward, gradient, velocities)
        return loss, metrics | words

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        """Return chains (n,), and the sigmas from which and to which their steps go."""
        u = chances(batch, "sigma", 1)[:, 0].to(batch.dt)
        high = LOWEST + (HIGHEST - LOWEST) * u
        low = (high - GAP).clamp(min=0.01)  # the network has not learned latents without noise
        return batch.chains.repeat(2), torch.cat([high, low]), torch.cat([low, high])

    def relative(
        self, field: RewardField, x0: Tensor, prompt: Tensor, down: Tensor, to: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return each step's reward (n,), its gradient (n, *latent), and metrics."""
        prefixes = self.options.prefixes
        if prefixes is None:
            return *field(x0, prompt), {}
        (better, up), (worse, other) = (field(x0, prompt, prefix) for prefix in prefixes)
        if bool((better == worse).all()):
            raise UserError(
                f"the reward is the same with {prefixes[0]!r} before the prompt as with "
                f"{prefixes[1]!r}: it does not read prompts. Take one that does, or set "
                "objective.prefixes to null"
            )
        done = (1 - to).to(better)
        (a, b), (c, d) = DOWN_K, UP_K
        k = torch.where(down, a + (b - a) * done, c + (d - c) * done)
        plus, minus = torch.where(down, 1 + k, -1.0), torch.where(down, -1.0, 1 + k)
        gradient = lift(plus, up) * up + lift(minus, other) * other
        metrics = {"path/word_gap": (better - worse).nanmean()}
        return plus * better + minus * worse, gradient, metrics

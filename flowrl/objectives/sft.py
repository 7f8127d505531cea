"""Weighted regression on the rollout's own images: SFT and RWR (2302.12192)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import RWROptions, SFTOptions
from flowrl.functional.groups import best_of_group, by_group, require_finite
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.batches import Endpoints, tied, without_siblings
from flowrl.objectives.noising import noise_images
from flowrl.trajectory import Metrics, Rollout


def exp_weight(reward: Tensor, group: Tensor, tau: float) -> Tensor:
    """Return exp(r / tau) over its mean in the group, of RWR (2302.12192). (N,)

    A constant added to the rewards of a prompt changes nothing, and nothing overflows.
    """
    require_finite(reward)
    scaled = reward / tau
    return by_group(group, lambda rows: len(rows) * scaled[rows].softmax(0)).to(reward)


@dataclass(frozen=True)
class WeightedRegression:
    """Base of SFT and RWR: the mean of weight * error."""

    options: SFTOptions | RWROptions

    @property
    def needs(self) -> Needs:
        return Needs(states="endpoints")

    def weights(self, rollout: Rollout) -> Tensor:
        """Return the weight of each image, 0 for those that are left out. (G,)"""
        raise NotImplementedError

    def prepare(self, rollout: Rollout) -> Endpoints:
        weight, forwards = self.weights(rollout), self.options.noising.count
        return Endpoints.from_rollout(
            rollout, weight, weight != 0, forwards=forwards, compared="image"
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        points = noise_images(batch, self.options.noising)
        error = points.error(points.velocity(models.policy)).mean(1)
        return (batch.signal * error).mean(), {
            "policy/error": error.detach().mean(),
            "policy/weight_max": batch.signal.max(),
        }


@dataclass(frozen=True)
class SFT(WeightedRegression):
    """Learn from the images at their prompt's maximum.

    Prompts whose images all score alike are left out, or every failure would be learned.
    """

    options: SFTOptions

    def weights(self, rollout: Rollout) -> Tensor:
        weight = torch.zeros(len(rollout.reward))
        keep = rollout.valid.cpu() & ~tied(rollout)
        reward, group = rollout.reward.cpu()[keep].double(), rollout.group.cpu()[keep]
        weight[keep] = best_of_group(reward, group).to(weight.dtype)
        return weight


@dataclass(frozen=True)
class RWR(WeightedRegression):
    """Weights exp(reward / tau), over their mean in the prompt."""

    options: RWROptions

    def weights(self, rollout: Rollout) -> Tensor:
        # A single image would be its own mean.
        valid = rollout.valid.cpu() & ~without_siblings(rollout)
        reward, group = rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid]
        weight = torch.zeros(len(valid), dtype=torch.float64)
        weight[valid] = exp_weight(reward, group, self.options.tau)
        return weight

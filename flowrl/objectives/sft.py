"""Weighted regression on the rollout's own images: SFT, best-of-n and RWR (2302.12192)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.groups import best_and_worst, best_of_group, group_rows, require_finite
from flowrl.objectives.advantage import tie_break_noise
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.batches import Endpoints, tied, without_siblings
from flowrl.objectives.noising import Noising
from flowrl.trajectory import Metrics, Rollout


def exp_weight(reward: Tensor, rwr_lambda: float) -> Tensor:
    """Return the weights exp(r / rwr_lambda) of reward-weighted regression (2302.12192). (N,)

    A constant added to the rewards of one prompt multiplies its weights: see
    `normalised_exp_weight`. Raises ValueError unless rwr_lambda > 0.
    """
    return (reward / _positive(rwr_lambda)).exp()


def normalised_exp_weight(reward: Tensor, group: Tensor, rwr_lambda: float) -> Tensor:
    """Return `exp_weight` over its mean in the group: only differences of rewards count. (N,)

    Cannot overflow. Raises ValueError unless rwr_lambda > 0 and the rewards are finite.
    """
    require_finite(reward)
    rows = group_rows(group)
    scaled = (reward / _positive(rwr_lambda))[rows.index]
    scaled = scaled.masked_fill(~rows.mask, -torch.inf)
    total = scaled.logsumexp(1) - rows.mask.sum(1).to(scaled).log()
    return (reward / rwr_lambda - total[rows.number]).exp()


def _positive(rwr_lambda: float) -> float:
    if not rwr_lambda > 0:
        raise ValueError(f"rwr_lambda is {rwr_lambda}; it must be positive")
    return rwr_lambda


@dataclass(frozen=True, kw_only=True)
class WeightedRegression:
    """Base of SFT and RWR: the mean of weight * error."""

    noising: Noising

    @property
    def needs(self) -> Needs:
        return Needs(states="endpoints")

    def weights(self, rollout: Rollout) -> Tensor:
        """Return the weight of each image, 0 for those that are left out. (G,)"""
        raise NotImplementedError

    def prepare(self, rollout: Rollout) -> Endpoints:
        weight = self.weights(rollout)
        return Endpoints.from_rollout(
            rollout, weight, weight != 0, forwards=self.noising.count, compared="image"
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        points = self.noising(batch)
        error = points.error(points.velocity(models.policy)).mean(1)
        return (batch.signal * error).mean(), {
            "policy/error": error.detach().mean(),
            "policy/weight_max": batch.signal.max(),
        }


@dataclass(frozen=True, kw_only=True)
class SFT(WeightedRegression):
    """Learn from the images at their prompt's maximum, "all" or "one" of them (best-of-n).

    Prompts whose images all score alike are left out, or every failure would be learned.
    """

    winners: Literal["all", "one"] = "all"

    def weights(self, rollout: Rollout) -> Tensor:
        weight = torch.zeros(len(rollout.reward))
        reward, group = rollout.reward.cpu().double(), rollout.group.cpu()
        if self.winners == "all":
            keep = rollout.valid.cpu() & ~tied(rollout)
            weight[keep] = best_of_group(reward[keep], group[keep]).to(weight.dtype)
        else:
            valid = rollout.valid.cpu().nonzero().squeeze(1)
            winner, _ = best_and_worst(reward[valid], group[valid], tie_break_noise(rollout)[valid])
            weight[valid[winner]] = 1.0
        return weight


@dataclass(frozen=True, kw_only=True)
class RWR(WeightedRegression):
    """Weights exp(reward / rwr_lambda), over their mean in the prompt if `normalise`."""

    rwr_lambda: float = 0.2
    normalise: bool = True

    def weights(self, rollout: Rollout) -> Tensor:
        valid = rollout.valid.cpu()
        if self.normalise:  # a single image would be its own mean
            valid = valid & ~without_siblings(rollout)
        reward, group = rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid]
        weight = torch.zeros(len(valid), dtype=torch.float64)
        weight[valid] = (
            normalised_exp_weight(reward, group, self.rwr_lambda)
            if self.normalise
            else exp_weight(reward, self.rwr_lambda)
        )
        return weight

"""Weighted regression on the rollout's own images: SFT, best-of-n and RWR (2302.12192)."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import best_and_worst, best_of_group
from flowrl.objectives.advantage import lots
from flowrl.objectives.base import Needs
from flowrl.objectives.batches import Endpoints, alone, endpoints, tied
from flowrl.objectives.noising import Noising, exp_weight, normalised_exp_weight
from flowrl.trajectory import Metrics, Rollout

Weights = Callable[[Rollout], Tensor]  # -> (G,), 0 for what is left out


class WeightedRegression:
    """Mean of weight * error. weights: what an image counts, from the rewards of its prompt."""

    def __init__(self, *, draws: Noising, weights: Weights):
        self.draws, self.weights = draws, weights
        self.needs = Needs(states="endpoints")

    def prepare(self, rollout: Rollout) -> Endpoints:
        weight = self.weights(rollout)
        return endpoints(rollout, weight, weight != 0, draws=self.draws.count, compared="image")

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
        error = points.error(points.velocity(policy)).mean(1)
        return (batch.signal * error).mean(), {
            "policy/error": error.detach().mean(),
            "policy/weight_max": batch.signal.max(),
        }


def all_winners(rollout: Rollout) -> Tensor:
    """1 for every image at its prompt's maximum: SFT, which draws p towards p F^(n-1).

    Prompts whose images are all alike count nothing, or every failure would be learned.
    """
    keep = rollout.valid.cpu() & ~tied(rollout)
    weight = torch.zeros(len(keep))
    reward, group = rollout.reward.cpu()[keep].double(), rollout.group.cpu()[keep]
    weight[keep] = best_of_group(reward, group).float()
    return weight


def one_winner(rollout: Rollout) -> Tensor:
    """1 for one image at its prompt's maximum, by lot: best-of-n. Tied prompts count nothing."""
    valid = rollout.valid.cpu().nonzero().squeeze(1)
    reward, group = rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid]
    winner, _ = best_and_worst(reward, group, lots(rollout)[valid])
    weight = torch.zeros(len(rollout.reward))
    weight[valid[winner]] = 1.0
    return weight


def exponential(rollout: Rollout, *, rwr_lambda: float, normalise: bool) -> Tensor:
    """exp(reward / rwr_lambda), over its mean in the prompt if normalised: RWR.

    Normalised, an image that is alone counts nothing: it would be its own mean.
    """
    valid = rollout.valid.cpu()
    if normalise:
        valid = valid & ~alone(rollout)
    reward, group = rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid]
    weight = torch.zeros(len(valid), dtype=torch.float64)
    weight[valid] = (
        normalised_exp_weight(reward, group, rwr_lambda)
        if normalise
        else exp_weight(reward, rwr_lambda)
    )
    return weight

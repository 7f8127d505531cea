"""Selective KL, of Astrolabe (2603.17051): which images pay the penalty of `kl_coef`.

Where the trained reward ranks an image high in its group and another reward ranks it low, or the
reverse, one of them is wrong: there the policy stays near the base model, elsewhere it is free.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flowrl.config.objectives import KLOnOptions
from flowrl.errors import UserError
from flowrl.functional.groups import ranks
from flowrl.objectives.advantage import tie_break_noise, top_share
from flowrl.scoring.spec import RewardSpec
from flowrl.trajectory import Rollout


def kl_weights(rollout: Rollout, options: KLOnOptions, among: Tensor) -> Tensor:
    """Return 1 for the images that pay the penalty and 0 for the rest. (G,) fp32

    The share is of the images `among` (G,) bool, of all processes. Images without one of the two
    scores pay after all others.
    """
    other = rollout.scores.cpu()[:, rollout.names.index(options.reward)]
    apart = disagreement(rollout.reward.cpu(), other, rollout.group.cpu())
    rows = among.nonzero().squeeze(1)
    weight = torch.zeros(len(among))
    weight[rows] = top_share(apart[rows], options.share, tie_break_noise(rollout)[rows]).to(weight)
    return weight


def disagreement(reward: Tensor, other: Tensor, group: Tensor) -> Tensor:
    """Return |rank - other rank| / (K - 1) in the group, 0 to 1; -1 without a score. (N,)

    reward, other: (N,), NaN where missing; K counts the images of the group with both.
    """
    both = reward.isfinite() & other.isfinite()
    apart = -torch.ones(len(group), dtype=torch.float64)
    apart[both] = (ranks(reward[both], group[both]) - ranks(other[both], group[both])).abs()
    return apart


def check_kl_on(options: KLOnOptions, specs: Sequence[RewardSpec], scored: Collection[str]) -> None:
    """Raise UserError unless the other reward is one of the rollouts' and more of it is better.

    scored: names of the rewards that the images of a rollout have.
    """
    option = f"objective.kl_on.reward is {options.reward!r}"
    spec = next((spec for spec in specs if spec.name == options.reward), None)
    if spec is None:
        names = ", ".join(spec.name for spec in specs)
        raise UserError(f"{option}, expected the name of a reward of this run: {names}")
    if spec.name not in scored:
        raise UserError(
            f"{option}, which has no scores of the images that are learned from: set its option "
            "when to both, or collect the store with it"
        )
    if [other.name for other in specs if other.trained] == [spec.name]:
        raise UserError(
            f"{option}, the only trained reward, which agrees with itself: name another reward"
        )
    if spec.weight < 0:
        raise UserError(
            f"{option}, of which less is better (its weight is {spec.weight:g}), and ranks are "
            "compared: name a reward of which more is better"
        )

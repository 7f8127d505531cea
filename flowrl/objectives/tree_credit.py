"""Credit: from what the pictures of a forest are worth to the advantages of its trained edges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.objectives import credit as maths
from flowrl.objectives import selection
from flowrl.objectives.advantage import scale_of, worth
from flowrl.objectives.advantage_maths import clip_advantage
from flowrl.objectives.normalise import (
    Centre,
    Scale,
    Scope,
    class_population,
    normalise,
    population,
)
from flowrl.trajectory import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The pictures of N trees: reward, valid, advantage (N, l); group (N,), the tree's prompt;
    siblings (l,), the node of the last split that a leaf hangs on."""

    reward: Tensor
    valid: Tensor
    advantage: Tensor
    group: Tensor
    siblings: Tensor


Fusion = Literal["uniform", "path", "local"]
Keep = Callable[[Leaves], Tensor]  # -> (N, l) bool


def keep_all(leaves: Leaves) -> Tensor:
    """Also those without a valid reward: their steps have no advantage."""
    return torch.ones_like(leaves.valid)


def keep_parent_top1(leaves: Leaves) -> Tensor:
    return selection.parent_top1(leaves.reward, leaves.valid, leaves.siblings)


def keep_extreme(leaves: Leaves, count: int) -> Tensor:
    """Of all trees of a prompt, which stand side by side and are as many for each."""
    prompts = len(leaves.group.unique())
    reward, valid = (t.view(prompts, -1) for t in (leaves.reward, leaves.valid))
    return selection.extreme(reward, valid, count).view_as(leaves.valid)


def keep_max_variance(leaves: Leaves, count: int) -> Tensor:
    reward, valid = leaves.reward, leaves.valid
    group = leaves.group.repeat_interleave(reward.shape[1])
    return selection.max_variance(reward.flatten(), valid.flatten(), group, count).view_as(valid)


def keep_b2_pairs(leaves: Leaves, threshold: float) -> Tensor:
    return selection.b2_pairs(leaves.advantage, leaves.valid, leaves.siblings, threshold)


def node_values(
    rollout: Rollout, reward: Tensor, valid: Tensor, fusion: Fusion, path_coef: float
) -> Tensor:
    """What lies below each node of all trees, (N, n), NaN where nothing there is valid.

    reward, valid: (N, l) of the leaves, on the CPU.
    """
    parent, leaf = rollout.tree.parent.cpu(), rollout.tree.leaf.cpu()
    if fusion == "local":
        return maths.fuse_local(parent, leaf, reward, valid, rollout.log_prob, path_coef)
    below = maths.leaves_below(parent, leaf)
    if fusion == "path":
        return maths.fuse_path(below, reward, valid, rollout.log_prob, path_coef)
    return maths.fuse_uniform(below, reward, valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Fuse the leaves' rewards upward, normalise, credit the edges, select those to learn from.

    See the options of the same names under `objective.credit`. The whole forest of all processes
    is credited, since a group may lie on several of them; each takes the edges of its own trees.
    """

    rewards: str = "sum"
    fusion: Fusion = "uniform"
    path_coef: float = 1.0
    edges: maths.Credit = "node"
    scope: Scope = "prompt"
    center: Centre = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0
    keep: Keep = keep_all

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages (R, e) fp32 of this process's trained edges, and which are kept, bool."""
        tree = rollout.tree
        parent, leaf, edge = tree.parent.cpu(), tree.leaf.cpu(), tree.edge.cpu()
        below = maths.leaves_below(parent, leaf)
        group = rollout.group.view(-1, len(leaf))[:, 0]
        reward, valid = (t.view(-1, len(leaf)) for t in worth(rollout, self.rewards))
        value = node_values(rollout, reward, valid, self.fusion, self.path_coef)
        node = self._normalise(rollout, value, group)
        credit = maths.credit_edges(
            node, ~value.isnan(), self.edges, parent=parent, leaf=leaf, below=below
        )
        leaves = Leaves(
            reward=reward,
            valid=valid,
            advantage=node[:, leaf],
            group=group,
            siblings=selection.last_split(parent, leaf),
        )
        kept = selection.edges_above(below, self.keep(leaves))
        own = rollout.trees.cpu()
        return clip_advantage(credit[own][:, edge], self.clip).float(), kept[own][:, edge]

    def _normalise(self, rollout: Rollout, value: Tensor, group: Tensor) -> Tensor:
        """(N, n) advantages of the nodes."""
        tree = rollout.tree
        parent, leaf, step = tree.parent.cpu(), tree.leaf.cpu(), tree.step.cpu()
        if self.edges == "fan":
            owner = torch.arange(len(group)) if self.scope == "leaf" else group
            among = class_population(owner, tree.move.cpu()[leaf], parent=parent, leaf=leaf)
        else:
            noisy = torch.zeros(len(parent), dtype=torch.bool)
            noisy[tree.noisy.cpu()] = True
            among = population(self.scope, group=group, parent=parent, step=step, noisy=noisy)
        return normalise(
            value,
            among,
            centre=self.center,
            scale=scale_of(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )

"""Advantages: how much better an image, or a node of a tree, is than those it is compared with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.groups import lone
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.scoring.combine import combine_gdpo
from flowrl.trajectory import Rollout

Scope = Literal["leaf", "prompt", "depth", "sibling", "joint"]
Center = Literal["mean", "median"]
Scale = Literal["std", "mad", "none", "global"]

# Differences below this share of a tree's largest value are rounding errors of fused values.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Compare the images of each prompt; see the options of the same names."""

    rewards: str = "sum"
    center: Center = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages (G,) fp32, 0 where there is nothing to compare with, and a mask (G,).

        The mask is True for images with a reward of prompts with at least two of them.
        """
        value, valid = image_reward(rollout, self.rewards)
        group = rollout.group.cpu()
        whole = torch.ones(1, dtype=torch.bool)
        advantage = normalise(
            value.masked_fill(~valid, torch.nan)[:, None],
            Population(key=group[:, None], counted=whole, leaf=whole),
            center=self.center,
            scale=resolve_scale(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )
        compared = valid & ~lone(valid, group)
        return clip_advantage(advantage.squeeze(1), self.clip).float(), compared


def image_reward(rollout: Rollout, rewards: str) -> tuple[Tensor, Tensor]:
    """Return each image's reward (G,), and whether it is known (G,) bool.

    rewards: "sum", the weighted sum, or "gdpo", GDPO's sum of each reward's z-scores, which is
    known as soon as one of them is.
    """
    if rewards == "sum":
        return rollout.reward.cpu(), rollout.valid.cpu()
    combined = combine_gdpo(rollout.terms, rollout.weights, rollout.group, rollout.applicable)
    return combined, ~combined.isnan()


def resolve_scale(rewards: str, scale: Scale | Literal["auto"]) -> Scale:
    """Replace "auto": "global" is the last step of GDPO, for its z-scores; "std" otherwise."""
    if scale != "auto":
        return scale
    return "global" if rewards == "gdpo" else "std"


def clip_advantage(advantage: Tensor, limit: float) -> Tensor:
    """Bound advantages to [-limit, limit]; a group's sum is then no longer exactly 0."""
    return advantage.clamp(-limit, limit)


def tie_break_noise(rollout: Rollout) -> Tensor:
    """Return a number in [0, 1) for each image that breaks ties, new in each rollout. (G,)"""
    seeds = [
        noise_seed(seed=rollout.seed, iteration=0, prompt="", root=image, step=0, role="lot")
        for image in range(len(rollout.reward))
    ]
    return keyed_uniform(seeds, (1,)).squeeze(1)


# --- Nodes of trees, each against those it is compared with ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Which of the n nodes of R trees are compared with each other."""

    key: Tensor  # (R, n) long, number of the node's population
    counted: Tensor  # (n,) bool, nodes that enter its statistics; others are only measured by them
    leaf: Tensor  # (n,) bool


def population(
    scope: Scope,
    *,
    group: Tensor,
    parent: Tensor,
    step: Tensor,
    noisy: Tensor | None = None,
) -> Population:
    """Return the populations of a scope.

    Args:
        scope: nodes are compared with the leaves of their own tree (leaf); those of all trees of
            the prompt (prompt), TreeGRPO (2512.08153); nodes of their step in their tree (depth),
            BranchGRPO (2509.06040); children of their parent (sibling); or the `noisy` nodes of all
            trees of the prompt (joint), Stepwise-Flow-GRPO (2603.28718).
        group: (R,) long, prompt of each tree.
        parent, step: (n,) long.
        noisy: (n,) bool, needed by joint.

    Raises:
        ValueError: another scope.
    """
    nodes, tree, prompt = torch.arange(len(parent)), torch.arange(len(group)), group.cpu()
    tree, prompt = tree[:, None], prompt[:, None]
    leaf, every = ~torch.isin(nodes, parent), torch.ones(len(parent), dtype=torch.bool)
    choices = {
        "leaf": (tree, leaf),
        "prompt": (prompt, leaf),
        "depth": (tree * (step.max() + 1) + step, every),
        "sibling": (tree * (len(parent) + 1) + parent + 1, every),
        "joint": (prompt, every if noisy is None else noisy),
    }
    key, counted = choices[_choice("advantage scope", scope, choices)]
    if scope == "joint" and noisy is None:
        raise ValueError("scope 'joint' compares the noisy nodes, and `noisy` is None")
    return Population(key=key.expand(len(group), len(parent)), counted=counted, leaf=leaf)


def class_population(
    owner: Tensor, leaf_class: Tensor, *, parent: Tensor, leaf: Tensor
) -> Population:
    """Compare leaves with those of their own class: the fan and the stride they come from.

    TempFlow-GRPO (2508.04324) and G2RPO (2510.01982). leaf_class, leaf: (l,) long. owner: (R,)
    long, who shares a population: the tree's own number, or its prompt. Nodes that are not leaves
    have no population and get 0.
    """
    classes = torch.full((len(parent),), -1)
    classes[leaf] = leaf_class
    counted = classes >= 0
    key = owner.cpu()[:, None] * (classes.max() + 1) + classes
    return Population(key=torch.where(counted, key, -1), counted=counted, leaf=counted)


def normalise(
    value: Tensor,
    among: Population,
    *,
    center: Center = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    floor: float = 1e-4,
) -> Tensor:
    """Return the advantages (v - center) / (scale + floor). (R, n) float64, never NaN.

    Args:
        value: (R, n), NaN where a node has none.
        center: the median of an even number is the mean of the middle two.
        scale: std with `ddof`, mad (median distance to the median), global (std of all leaves of
            all trees) or none, which divides by 1. Median, mad and floor 1e-3 are MC-GRPO's
            (2601.22582).

    A population with fewer than two values, or with values equal up to rounding, gets exactly 0,
    and so does a node at the center. Raises ValueError unless floor > 0, or for other words.
    """
    if not floor > 0:
        raise ValueError(f"floor is {floor}; it must be positive, for scales can be 0")
    exact = value.detach().cpu().double()
    known = ~exact.isnan()
    rounding = ROUNDING * torch.where(known, exact.abs(), 0.0).amax(1, keepdim=True)
    middle = CENTERS[_choice("advantage center", center, CENTERS)]
    spread = _spread(scale, exact[:, among.leaf], ddof, floor)
    flat, tiny = exact.flatten(), rounding.expand_as(exact).flatten()
    counted = (among.counted & known).flatten()
    advantage = torch.zeros_like(flat)
    places = torch.nonzero(known.flatten()).squeeze(1)
    names, order = among.key.flatten()[places].sort(stable=True)
    sizes = names.unique_consecutive(return_counts=True)[1].tolist()
    for rows in places[order].split(sizes):
        members = flat[rows[counted[rows]]]
        tolerance = tiny[rows].max()
        if len(members) > 1 and bool(members.max() - members.min() > tolerance):
            away = flat[rows] - middle(members)
            away = torch.where(away.abs() > tolerance, away, 0.0)
            advantage[rows] = away / spread(members)
    return advantage.view_as(exact)


def _median(members: Tensor) -> Tensor:
    # torch.median takes the lower of the middle two, which is biased.
    ordered = members.sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _std(members: Tensor, ddof: int) -> Tensor:
    return members.std(correction=ddof) if len(members) > ddof else members.new_zeros(())


CENTERS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "median": _median}


def _spread(scale: Scale, leaves: Tensor, ddof: int, floor: float) -> Callable[[Tensor], Tensor]:
    """Return what deviations are divided by, as a function of a population's members."""
    leaves = leaves[~leaves.isnan()]
    spreads: dict[str, Callable[[Tensor], Tensor]] = {
        "std": lambda members: _std(members, ddof) + floor,
        "mad": lambda members: _median((members - _median(members)).abs()) + floor,
        "none": lambda members: members.new_ones(()),
        "global": lambda _: _std(leaves, ddof) + floor,
    }
    return spreads[_choice("advantage scale", scale, spreads)]


def _choice(what: str, word: str, options: Collection[str]) -> str:
    if word not in options:
        raise ValueError(f"{what} is {word!r}; it must be one of {', '.join(options)}")
    return word


def exact_rewards(reward: Tensor, valid: Tensor) -> Tensor:
    """Return float64 on the CPU. Raises ValueError when a valid reward is not finite."""
    exact = reward.detach().cpu().double()
    if not bool(exact[valid.cpu()].isfinite().all()):
        raise ValueError("a valid reward is not finite: mark its leaf invalid instead")
    return exact


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """How much the groups of one rollout can teach."""

    groups: int  # prompts, those without a valid reward included
    no_signal: float  # share of groups whose advantages are all 0
    invalid: float  # share of rows without a reward
    spread: float  # population std inside a group, averaged over groups with a valid row


def group_stats(reward: Tensor, valid: Tensor, group: Tensor) -> GroupStats:
    """Return the share of groups without signal, of missing rewards, and the spread; never NaN."""
    exact, valid, group = exact_rewards(reward, valid), valid.cpu(), group.cpu()
    members = [exact[valid & (group == name)] for name in group[valid].unique()]
    groups = len(group.unique())
    # Compared, not subtracted from a mean: the mean of three times 0.1 is not 0.1.
    silent = groups - sum(bool(m.min() < m.max()) for m in members)
    spread = sum(m.std(correction=0).item() for m in members)
    return GroupStats(
        groups=groups,
        no_signal=silent / max(groups, 1),
        invalid=(~valid).double().mean().item() if len(valid) else 0.0,
        spread=spread / max(len(members), 1),
    )

"""What each image of a rollout is worth, and how much better it is than others of its prompt."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.groups import lone
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.scoring.combine import combine_gdpo
from flowrl.trajectory import Rollout

# --- Plain groups: what they can teach, and the bound on advantages ----------------------------


def clip_advantage(advantage: Tensor, limit: float) -> Tensor:
    """Bound advantages to [-limit, limit]; a group's sum is then no longer exactly 0."""
    return advantage.clamp(-limit, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """How much the groups of one rollout can teach."""

    groups: int  # prompts, those without a valid reward included
    no_signal: float  # share of groups whose advantages are all 0
    invalid: float  # share of rows without a reward
    spread: float  # population std inside a group, averaged over groups with a valid row


def group_stats(reward: Tensor, valid: Tensor, group: Tensor) -> GroupStats:
    """Diagnosis of a rollout: groups without signal, missing rewards, spread. Never NaN."""
    exact = exact_rewards(reward, valid)
    members = [exact[rows] for rows in _groups(valid, group)]
    groups = len(group.unique())
    silent = groups - sum(_has_signal(m) for m in members)
    spread = sum(m.std(correction=0).item() for m in members)
    return GroupStats(
        groups=groups,
        no_signal=silent / max(groups, 1),
        invalid=(~valid).double().mean().item() if len(valid) else 0.0,
        spread=spread / max(len(members), 1),
    )


def _groups(valid: Tensor, group: Tensor) -> Iterator[Tensor]:
    """Indices of the valid rows of each group that has any."""
    valid, group = valid.cpu(), group.cpu()
    for name in group[valid].unique():
        yield torch.nonzero(valid & (group == name)).squeeze(1)


def _has_signal(members: Tensor) -> bool:
    # Compared, not subtracted from a mean: the mean of three times 0.1 is not 0.1.
    return bool(members.min() < members.max())


# --- From values to advantages: each node against those it is compared with --------------------

Scope = Literal["leaf", "prompt", "depth", "sibling", "joint"]
Centre = Literal["mean", "median"]
Scale = Literal["std", "mad", "none", "global"]

# Differences below this share of a tree's largest value are rounding errors of fused values.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Who is compared with whom among the n nodes of R trees.

    key: (R, n) long, the name of a node's population. counted: (n,) bool, the nodes that make
    its statistics; the others are only measured by them. leaf: (n,) bool.
    """

    key: Tensor
    counted: Tensor
    leaf: Tensor


def population(
    scope: Scope,
    *,
    group: Tensor,
    parent: Tensor,
    step: Tensor,
    noisy: Tensor | None = None,
) -> Population:
    """The populations of a scope. group: (R,) long, prompt of a tree; parent, step: (n,) long.

    leaf: by the leaves of the node's own tree. prompt: by those of all trees of the prompt,
    TreeGRPO (2512.08153). depth: nodes of one step in one tree, BranchGRPO (2509.06040). sibling:
    children of one parent. joint: by the `noisy` nodes, (n,) bool, of all trees of the prompt,
    Stepwise-Flow-GRPO (2603.28718). Raises ValueError for other words.
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
    """Leaves against those of their own class: the fan and the stride they come from.

    TempFlow-GRPO (2508.04324) and G2RPO (2510.01982). leaf_class, leaf: (l,) long. owner: (R,)
    long, who shares a population: the tree's own number (one seed), or its prompt. Nodes that are
    not leaves have no population and get 0.
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
    centre: Centre = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    floor: float = 1e-4,
) -> Tensor:
    """Advantages (v - centre) / (scale + floor). (R, n) float64, never NaN.

    centre: of an even number the median is the mean of the middle two. scale: std with `ddof`,
    mad (median distance to the median), global (std of all leaves with a value, of all trees) or
    none, which divides by 1. Median, mad and floor 1e-3 are MC-GRPO's (2601.22582). A population
    with fewer than two values, or with values equal up to rounding, gets exactly 0, and so does a
    node that is at the centre. Raises ValueError unless floor > 0, or for other words.
    """
    if not floor > 0:
        raise ValueError(f"floor is {floor}; it must be positive, for scales can be 0")
    exact = value.detach().cpu().double()
    known = ~exact.isnan()
    rounding = ROUNDING * torch.where(known, exact.abs(), 0.0).amax(1, keepdim=True)
    middle = CENTRES[_choice("advantage centre", centre, CENTRES)]
    spread = _spread(scale, exact[:, among.leaf], ddof, floor)
    flat, tiny = exact.flatten(), rounding.expand_as(exact).flatten()
    counted = (among.counted & known).flatten()
    advantage = torch.zeros_like(flat)
    for rows in _together(among.key, known):
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


CENTRES: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "median": _median}


def _spread(scale: Scale, leaves: Tensor, ddof: int, floor: float) -> Callable[[Tensor], Tensor]:
    """What deviations are divided by, for the members of a population."""
    leaves = leaves[~leaves.isnan()]
    spreads: dict[str, Callable[[Tensor], Tensor]] = {
        "std": lambda members: _std(members, ddof) + floor,
        "mad": lambda members: _median((members - _median(members)).abs()) + floor,
        "none": lambda members: members.new_ones(()),
        "global": lambda _: _std(leaves, ddof) + floor,
    }
    return spreads[_choice("advantage scale", scale, spreads)]


def _together(key: Tensor, known: Tensor) -> Iterator[Tensor]:
    """Flat indices of the nodes with a value, population by population."""
    rows = torch.nonzero(known.flatten()).squeeze(1)
    names, order = key.flatten()[rows].sort(stable=True)
    yield from rows[order].split(names.unique_consecutive(return_counts=True)[1].tolist())


def _choice(what: str, word: str, options: Collection[str]) -> str:
    if word not in options:
        raise ValueError(f"{what} is {word!r}; it must be one of {', '.join(options)}")
    return word


def exact_rewards(reward: Tensor, valid: Tensor) -> Tensor:
    """Float64 on the CPU. Raises ValueError when a valid reward is not finite."""
    exact = reward.detach().cpu().double()
    if not bool(exact[valid.cpu()].isfinite().all()):
        raise ValueError("a valid reward is not finite: mark its leaf invalid instead")
    return exact


# --- What each image of a rollout is worth, and how much better it is than others of its pr --


def worth(rollout: Rollout, rewards: str) -> tuple[Tensor, Tensor]:
    """(G,) what each image is worth, and whether that is known.

    rewards: "sum", the weighted sum, or "gdpo", GDPO's sum of each reward's z-scores, which is
    known as soon as one of them is.
    """
    if rewards == "sum":
        return rollout.reward.cpu(), rollout.valid.cpu()
    combined = combine_gdpo(rollout.terms, rollout.weights, rollout.group, rollout.applicable)
    return combined, ~combined.isnan()


def scale_of(rewards: str, scale: Scale | Literal["auto"]) -> Scale:
    """What divides: "auto" is the last step of GDPO for its z-scores, else the group's std."""
    if scale != "auto":
        return scale
    return "global" if rewards == "gdpo" else "std"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Normalise the worth of the images of each prompt; see the options `advantage`."""

    rewards: str = "sum"
    center: Centre = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(G,) fp32, 0 where there is nothing to compare with; and which images are compared:
        those whose worth is known, of prompts with at least two such images."""
        value, valid = worth(rollout, self.rewards)
        group = rollout.group.cpu()
        whole = torch.ones(1, dtype=torch.bool)
        among = Population(key=group[:, None], counted=whole, leaf=whole)
        advantage = normalise(
            value.masked_fill(~valid, torch.nan)[:, None],
            among,
            centre=self.center,
            scale=scale_of(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )
        compared = valid & ~lone(valid, group)
        return clip_advantage(advantage.squeeze(1), self.clip).float(), compared


def lots(rollout: Rollout) -> Tensor:
    """(G,) in [0, 1): a number for each image by which ties are broken, anew in each rollout."""
    seeds = [
        noise_seed(seed=rollout.seed, iteration=0, prompt="", root=image, step=0, role="lot")
        for image in range(len(rollout.reward))
    ]
    return keyed_uniform(seeds, (1,)).squeeze(1)

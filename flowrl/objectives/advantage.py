"""Advantages: how much better an image, or a node of a tree, is than those it is compared with."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import AdvantageOptions
from flowrl.functional.groups import groups_of, lone
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.scoring.combine import share_weights
from flowrl.trajectory import Rollout

ADVANTAGE_CLIP = 5.0  # largest advantage of either sign in Flow-GRPO, DiffusionNFT and AWM
MOST_EMPHASIS = 4.0  # of one image's advantage
ROUNDING = 1e-12  # differences below this share of the largest value are rounding errors
# Added to a standard deviation, as in Flow-GRPO and GDPO, so that differences far below it, such as
# a network's rounding between equal images, stay small. DanceGRPO and BranchGRPO add 1e-8 to the
# sample's standard deviation, which is that of the population times sqrt(n / (n - 1)).
FLOOR = 1e-4
GDPO = AdvantageOptions(scale="std")  # of each reward in its group


def z_scores(
    value: Tensor,
    population: Tensor,
    options: AdvantageOptions,
    counted: Tensor | None = None,
    leaf: Tensor | None = None,
) -> Tensor:
    """Return (value - mean) / (std + FLOOR) of each value in its population. (N,) float64

    A population with fewer than two values, or with equal ones, gets exactly 0; so does NaN.

    Args:
        value: (N,), NaN where there is none.
        population: (N,) long, the values of one number are compared with each other.
        counted: (N,) bool, values that enter mean and std; the rest is only measured by them.
        leaf: (N,) bool, values whose std is the divisor with scale global. Both default to all.
    """
    value, population = value.detach().cpu().double(), population.cpu()
    present, advantage = ~value.isnan(), torch.zeros(len(value), dtype=torch.float64)
    counted = present if counted is None else present & counted
    everything = value[present if leaf is None else present & leaf]
    for rows in groups_of(population):
        rows, members = rows[present[rows]], value[rows[counted[rows]]]
        if len(members) > 1 and members.max() - members.min() > _rounding(members):
            distance = value[rows] - members.mean()
            distance = torch.where(distance.abs() > _rounding(members), distance, 0.0)
            advantage[rows] = distance / divisor(members, everything, options)
    return advantage


def _rounding(members: Tensor) -> Tensor:
    return ROUNDING * members.abs().max()


def divisor(members: Tensor, everything: Tensor, options: AdvantageOptions) -> Tensor:
    """Return the number that distances from the mean are divided by. ()

    members: the values of a population; everything: those of all leaves. float64.
    """
    scale = options.scale
    if scale == "auto":  # the last step of GDPO divides its sum of z-scores by their global std
        scale = "global" if options.rewards == "gdpo" else "std"
    if scale == "none":
        return torch.ones((), dtype=members.dtype)
    values = everything if scale == "global" else members
    return values.std(correction=0) + FLOOR


def clip_advantage(advantage: Tensor) -> Tensor:
    """Bound advantages to +-ADVANTAGE_CLIP; a group's sum is then no longer exactly 0."""
    return advantage.clamp(-ADVANTAGE_CLIP, ADVANTAGE_CLIP)


def image_advantages(rollout: Rollout, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return the advantages of all images (G,) fp32, and which of them are compared (G,) bool.

    Compared are images with a reward of prompts with at least two of them; the rest gets 0.
    """
    value, valid = image_reward(rollout, options)
    group = compared_group(rollout, options)
    advantage = z_scores(value.masked_fill(~valid, torch.nan), group, options)
    advantage = advantage * emphasis(rollout, options)
    return clip_advantage(advantage).float(), valid & ~lone(valid, group)


def compared_group(rollout: Rollout, options: AdvantageOptions) -> Tensor:
    """Return each image's group, or one group of all where `tracker` centers them. (G,) long"""
    group = rollout.group.cpu()
    return torch.zeros_like(group) if options.center == "tracker" else group


def emphasis(rollout: Rollout, options: AdvantageOptions) -> Tensor:
    """Return the weight of each image's advantage, by how often its prompt fails. (G,) float64

    exp(eta L) over its mean, the weights that maximise sum q L + H(q) / eta: Prompt-GDRO
    (2601.19280), whose loss L, that of a bin of prompts, is the share of failures of one here.
    """
    if not options.emphasis or rollout.expected_failures is None:
        return torch.ones(len(rollout.group), dtype=torch.float64)
    share = (options.emphasis * rollout.expected_failures).softmax(0)
    return (share * len(share)).clamp(max=MOST_EMPHASIS)


def image_reward(rollout: Rollout, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Return each image's reward (G,), less what the tracker expects, and whether it has one."""
    if options.rewards == "sum":
        reward = rollout.reward.cpu()
        if options.center == "tracker" and rollout.expected_reward is not None:
            reward = reward - rollout.expected_reward
        return reward, rollout.valid.cpu()
    combined = combine_gdpo(rollout.scores, rollout.weights, rollout.group, rollout.applicable)
    return combined, ~combined.isnan()


def combine_gdpo(scores: Tensor, weights: Tensor, group: Tensor, applicable: Tensor) -> Tensor:
    """Return the weighted sum of each reward's z-scores in its group, (L,) float64 on the CPU.

    GDPO (2601.05242). Weights are those of `share_weights`. A reward that applies and failed adds 0
    and the others do not grow for it, so that every group sums to 0. An image without any of its
    scores is NaN. The paper's last step, by the standard deviation of the batch, is `divisor`
    with scale "auto".
    """
    scores, group, applicable = scores.detach().cpu(), group.cpu(), applicable.cpu()
    share = share_weights(applicable, weights.detach().cpu().double())
    scores = torch.where(share != 0, scores, torch.nan)
    z = torch.stack([z_scores(column, group, GDPO) for column in scores.unbind(1)], 1)
    return torch.where(scores.isfinite().any(1), (share * z).sum(1), torch.nan)


def tie_break_noise(rollout: Rollout) -> Tensor:
    """Return a number in [0, 1) for each image that breaks ties, new in each rollout. (G,)"""
    seeds = [
        noise_seed(seed=rollout.seed, iteration=0, prompt="", root=image, step=0, role="lot")
        for image in range(len(rollout.reward))
    ]
    return keyed_uniform(seeds, (1,)).squeeze(1)


def top_share(value: Tensor, share: float, lot: Tensor) -> Tensor:
    """Mark the share of rows with the largest values, rounded up. (N,) bool

    Of equal ones those with the smallest `lot`, (N,) random numbers.
    """
    order = lot.argsort(stable=True)
    order = order[value[order].argsort(descending=True, stable=True)]
    chosen = torch.zeros(len(value), dtype=torch.bool)
    chosen[order[: math.ceil(share * len(value) - 1e-9)]] = True  # 0.07 * 100 > 7
    return chosen


def exact_rewards(reward: Tensor, valid: Tensor) -> Tensor:
    """Return float64 on the CPU. Raises ValueError when a valid reward is not finite."""
    exact = reward.detach().cpu().double()
    if not bool(exact[valid.cpu()].isfinite().all()):
        raise ValueError("a valid reward is not finite: mark its leaf invalid instead")
    return exact


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """How much the groups of one rollout can teach."""

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
        no_signal=silent / max(groups, 1),
        invalid=(~valid).double().mean().item() if len(valid) else 0.0,
        spread=spread / max(len(members), 1),
    )

"""The options of credit: from the rewards of a tree's leaves to the advantages of its edges."""

from typing import Annotated, Literal

from pydantic import Field

from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count
from flowrl.utils.fields import Count, NonNegative, Positive, Section, option

BRANCH_GRPO = "BranchGRPO, arXiv 2509.06040"


class KeepAll(Section):
    """Learn from every picture."""

    kind: Literal["all"] = option("all", "Nothing is left out.")


class ParentTop1(Section):
    """Width pruning: learn from the better child of each node of the last split."""

    kind: Literal["parent_top1"] = option(
        "parent_top1", "The best picture below each node of the last split.", BRANCH_GRPO
    )


class Extreme(Section):
    """Width pruning: learn from a prompt's best and worst pictures."""

    kind: Literal["extreme"] = option("extreme", "The best and the worst of a prompt.", BRANCH_GRPO)
    count: Count = option(2, "How many of the best, and as many of the worst.")


class MaxVariance(Section):
    """Learn from the pictures of a prompt whose rewards differ most."""

    kind: Literal["max_variance"] = option(
        "max_variance", "The pictures of a prompt with the largest variance.", "D3S, 2509.22115"
    )
    count: Count = option(..., "How many pictures of a prompt are kept.")


class B2Pairs(Section):
    """Learn from the best and the worst child of a branch, where they stand out."""

    kind: Literal["b2_pairs"] = option(
        "b2_pairs", "The best and the worst child of each branch.", "B2-DiffuRL, arXiv 2503.11240"
    )
    threshold: NonNegative = option(
        0.5, "Advantage that a best child needs, and a worst one below 0.", "B2-DiffuRL's code"
    )


Keep = Annotated[
    KeepAll | ParentTop1 | Extreme | MaxVariance | B2Pairs, Field(discriminator="kind")
]


class Credit(Section):
    """How much each denoising step is to blame or praise for the pictures below it."""

    rewards: Literal["sum", "gdpo"] = option(
        "sum",
        "Several rewards: their weighted sum, or the weighted sum of each reward's distance from "
        "its mean in the group, in standard deviations (gdpo). A picture that lacks one of its "
        "scores is left out of a sum; under gdpo that reward alone counts 0.",
        "gdpo: GDPO, arXiv 2601.05242, with scale auto, ddof 0 and floor 1e-4",
    )
    fusion: Literal["uniform", "path", "local"] = option(
        "uniform",
        "A node's value: the mean of the pictures below it, or weighted by how probable the way to "
        "each of them was, all the way down (path) or child by child (local).",
        "uniform: BranchGRPO's code; path: its equation 3; local: TreeGRPO, arXiv 2512.08153",
    )
    path_coef: NonNegative = option(
        1.0, "Factor on the log-probabilities that weigh; used unless fusion is uniform."
    )
    edges: Literal["node", "sibling", "path", "fan"] = option(
        "node",
        "What a step gets: the advantage of the node it leads to (node), the gain over the node it "
        "comes from (sibling), the sum over the pictures below (path), or that sum with pictures "
        "compared only within their own fan (fan).",
        "node: BranchGRPO; fan: TempFlow-GRPO, arXiv 2508.04324",
    )
    scope: Literal["prompt", "leaf", "depth", "sibling", "joint"] = option(
        "prompt",
        "What a value is compared with: the pictures of its prompt, those of its own tree (leaf), "
        "the nodes of its tree at the same step (depth), its siblings, or all stochastic steps of "
        "its prompt (joint).",
        "prompt: TreeGRPO; depth: BranchGRPO; joint: Stepwise-Flow-GRPO, arXiv 2603.28718",
    )
    center: Literal["mean", "median"] = option(
        "mean", "What is subtracted.", "median: MC-GRPO, arXiv 2601.22582, with odd groups"
    )
    scale: Literal["auto", "std", "mad", "none", "global"] = option(
        "auto",
        "What divides: the standard deviation, the median absolute deviation, nothing, or the "
        "standard deviation over all pictures of the iteration (global). auto is global for gdpo, "
        "whose last step it is, and std for a sum.",
        "global in Flow-GRPO's SD3 settings, std in most later ones; mad: MC-GRPO",
    )
    ddof: Literal[0, 1] = option(
        0, "0 for the population's standard deviation, 1 for the sample's.", "1 in DanceGRPO"
    )
    floor: Positive = option(
        1e-4, "Added to the divisor.", "1e-4 in Flow-GRPO, 1e-8 in BranchGRPO, 1e-3 in MC-GRPO"
    )
    clip: Positive = option(
        5.0, "Largest advantage, either sign.", "Flow-GRPO's published settings"
    )
    keep: Keep = option(
        KeepAll(),
        "Which pictures are learned from; kind: all, parent_top1, extreme, max_variance, b2_pairs. "
        "What is left out still counts in every comparison.",
    )


def check_credit(credit: Credit, plan: TreePlan) -> None:
    """The comparison that is asked for exists in the trees, and means something."""
    if count(plan).leaves == plan.roots:
        for name, value, instead in (
            ("scope", credit.scope in ("leaf", "depth", "sibling"), "prompt"),
            ("edges", credit.edges == "sibling", "node"),
            ("keep", credit.keep.kind == "parent_top1", "extreme or max_variance"),
        ):
            if value:
                raise ValueError(
                    f"objective.credit.{name} compares pictures of one tree, but each tree of "
                    f"rollout.tree has one picture: use {instead}"
                )
    if credit.edges == "sibling" and credit.scope in ("depth", "sibling"):
        raise ValueError(
            f"objective.credit.scope is {credit.scope}, which measures a node and the one it comes "
            "from by different comparisons, and edges: sibling subtracts them: use prompt, leaf or "
            "joint"
        )
    if credit.edges == "fan" and credit.scope not in ("leaf", "prompt"):
        raise ValueError(
            f"objective.credit.scope is {credit.scope}, but fans are compared within their tree "
            "(leaf) or over those of the prompt (prompt): use one of these with edges: fan"
        )

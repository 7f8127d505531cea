"""The options of a rollout's trees: one class a published method, found by its `kind`."""

import functools
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from flowrl.trees import presets
from flowrl.trees.plan import NoiseCoupling, TreePlan
from flowrl.trees.windows import (
    BRANCH_GRPO,
    FLOW_GRPO,
    MIX_GRPO,
    TREE_GRPO,
    GeometricWindow,
    ProgressiveWindow,
    RandomWindow,
    Window,
    random_share,
    random_step,
)
from flowrl.utils.fields import Count, Options, Text, Whole, option

DANCE_GRPO = "DanceGRPO, arXiv 2505.07818"
B2_DIFFURL = "B2-DiffuRL, arXiv 2503.11240"
TEMPFLOW = "TempFlow-GRPO, arXiv 2508.04324"
G2RPO = "G2RPO, arXiv 2510.01982"
E_GRPO = "E-GRPO, arXiv 2601.00423"
INSIDE = "Which steps are stochastic and trained; kind: all, fixed, random, progressive, geometric."
SIMPLEX = "independent in the paper; simplex loses none of the gradient to the group's mean"
SPLITS = "Steps at which to branch."
FIRST_HALF = "Steps with a fan; null is a random one of the first half in each rollout."
DANCE_SHARE = 0.6  # of the stochastic steps is trained
B2_FIRST = 0.7  # of the steps is trained at first: 14 of 20
B2_PERIOD = 100  # iterations over which the trained steps grow from there to all

Branch = Annotated[Count, Field(ge=2)]
Steps = Annotated[list[Whole], Field(max_length=1000)]


class TreeOptions(Options):
    """Options of one method's trees. Its `kind` is the name of its function in `trees.presets`."""

    title: ClassVar[str]  # as papers call it
    # What its paper or code has under objective.advantage where it differs from the defaults, and
    # the scale in any case, since recipes set another.
    credit: ClassVar[str] = ""
    static: ClassVar[bool] = False  # every iteration has the same plan

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        """Return what one rollout of an iteration does. Raises PlanError for what cannot work."""
        arguments = self.preset_arguments(iteration, steps, seed)
        hashable = ((n, tuple(v) if isinstance(v, list) else v) for n, v in arguments.items())
        return _plan(type(self).model_fields["kind"].default, steps, leaves, tuple(hashable))

    def preset_arguments(self, iteration: int, steps: int, seed: int) -> dict[str, Any]:
        """Return the preset's arguments: the options, with the steps of the window, if any."""
        arguments = self._fields()
        if "window" in arguments:
            arguments["window"] = arguments["window"].steps(iteration, steps, seed)
        return arguments

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in self if name != "kind"}


@functools.lru_cache(maxsize=1024)  # a recipe's check plans every iteration, and few differ
def _plan(preset: str, steps: int, leaves: int, arguments: tuple[tuple[str, Any], ...]) -> TreePlan:
    return getattr(presets, preset)(steps, leaves, **dict(arguments))


class ODEOptions(TreeOptions):
    """Independent chains without noise: the pipeline's own sampler."""

    title: ClassVar[str] = "GRPO"
    static: ClassVar[bool] = True
    kind: Literal["ode"] = option(
        "ode", "Independent chains without noise, for objectives that learn from images."
    )


class FlowGRPOOptions(TreeOptions):
    """Independent chains with noise in every step but the last."""

    title: ClassVar[str] = "Flow-GRPO"
    credit: ClassVar[str] = "{scale: global}"
    static: ClassVar[bool] = True
    kind: Literal["flow_grpo"] = option("flow_grpo", "Independent chains.", FLOW_GRPO)


class FlowGRPOFastOptions(TreeOptions):
    """Independent chains, stochastic in a window only."""

    title: ClassVar[str] = "Flow-GRPO-Fast"
    credit: ClassVar[str] = "{scale: std}"
    kind: Literal["flow_grpo_fast"] = option(
        "flow_grpo_fast", "Independent chains, stochastic in a window.", "Flow-GRPO-Fast"
    )
    window: Window = option(RandomWindow(size=2), INSIDE, "Flow-GRPO-Fast, second version")


class DanceGRPOOptions(TreeOptions):
    """Chains from one initial noise; a random 60 % of the stochastic steps are trained."""

    title: ClassVar[str] = "DanceGRPO"
    credit: ClassVar[str] = "{scale: std, ddof: 1, floor: 1e-8}"
    kind: Literal["dance_grpo"] = option("dance_grpo", "Chains from one noise.", DANCE_GRPO)

    def preset_arguments(self, iteration: int, steps: int, seed: int) -> dict[str, Any]:
        return {"trained": random_share(steps, DANCE_SHARE, seed, iteration)}


class MixGRPOOptions(TreeOptions):
    """Chains from one initial noise, stochastic in a moving window only."""

    title: ClassVar[str] = "MixGRPO"
    credit: ClassVar[str] = "{scale: std, ddof: 1, floor: 1e-8}"
    kind: Literal["mix_grpo"] = option("mix_grpo", "One trunk up to the window.", MIX_GRPO)
    window: Window = option(ProgressiveWindow(size=4, period=25), INSIDE, MIX_GRPO)


class SiblingOptions(TreeOptions):
    """Options of trees whose nodes have several noisy children."""

    coupling: NoiseCoupling = option(
        NoiseCoupling(), "Dependence between the noises of siblings: {kind, strength}.", SIMPLEX
    )


class BranchGRPOOptions(SiblingOptions):
    """Trees with noise in every step but the last, which branch at chosen steps."""

    title: ClassVar[str] = "BranchGRPO"
    credit: ClassVar[str] = "{scope: depth, scale: std, ddof: 1, floor: 1e-8}"
    static: ClassVar[bool] = True
    kind: Literal["branch_grpo"] = option("branch_grpo", "Trees, all stochastic.", BRANCH_GRPO)
    branch: Branch = option(2, "Children at a split.", BRANCH_GRPO)
    splits: Steps = option([0, 3, 6, 9], SPLITS, f"{BRANCH_GRPO}: dense")
    coupling: NoiseCoupling = option(
        presets.BRANCH_COUPLING,
        "Dependence between the noises of siblings: {kind, strength}.",
        BRANCH_GRPO,
    )


class BranchGRPOMixOptions(BranchGRPOOptions):
    """Trees with noise at the splits and in a moving window only."""

    title: ClassVar[str] = "BranchGRPO-Mix"
    credit: ClassVar[str] = "{scope: depth, scale: std, ddof: 1, floor: 1e-8}"
    static: ClassVar[bool] = False
    kind: Literal["branch_grpo_mix"] = option(
        "branch_grpo_mix", "Trees, stochastic at the splits and in a window.", BRANCH_GRPO
    )
    window: Window = option(
        ProgressiveWindow(size=4, period=30),
        "Which steps are stochastic beside the splits.",
        BRANCH_GRPO,
    )


class TreeGRPOOptions(SiblingOptions):
    """Trees that branch at each step of a window, ODE elsewhere."""

    title: ClassVar[str] = "TreeGRPO"
    credit: ClassVar[str] = "{fusion: local, scale: std}"
    kind: Literal["tree_grpo"] = option("tree_grpo", "Trees in a window.", TREE_GRPO)
    branch: Branch = option(3, "Children at a step.", TREE_GRPO)
    window: Window = option(GeometricWindow(size=3, ratio=0.5), "Which steps branch.", TREE_GRPO)


class B2DiffuRLOptions(TreeOptions):
    """A stochastic trunk and continuations, whose trained part grows backwards."""

    title: ClassVar[str] = "B2-DiffuRL"
    credit: ClassVar[str] = "{scale: std, floor: 1e-8, keep: b2_pairs}"
    kind: Literal["b2_diffurl"] = option("b2_diffurl", "Continuations of a trunk.", B2_DIFFURL)
    branch: Branch = option(5, "Continuations of a trunk.", B2_DIFFURL)

    def preset_arguments(self, iteration: int, steps: int, seed: int) -> dict[str, Any]:
        trained = presets.b2_stage(iteration, B2_PERIOD, *self._ends(steps))
        return {"branch": self.branch, "last": trained}

    def _ends(self, steps: int) -> tuple[int, int]:
        """Return how many steps are trained at first, and at the end."""
        return max(2, round(B2_FIRST * steps)), max(2, steps)


class TempFlowOptions(SiblingOptions):
    """Trunks without noise, with a fan of one noisy step at every step."""

    title: ClassVar[str] = "TempFlow-GRPO"
    credit: ClassVar[str] = "{edges: fan, scope: leaf, scale: std}"
    kind: Literal["tempflow"] = option(
        "tempflow", "ODE trajectories that branch into several images at some steps.", TEMPFLOW
    )
    branch: Count = option(6, "Children of a fan.", TEMPFLOW)
    splits: Steps | None = option(None, "Steps with a fan; null is all but the last.", TEMPFLOW)


class G2RPOOptions(SiblingOptions):
    """Trunks with fans whose children are finished several times, coarsely and finely."""

    title: ClassVar[str] = "G2RPO"
    credit: ClassVar[str] = "{edges: fan, scope: leaf, scale: std}"
    kind: Literal["g2rpo"] = option(
        "g2rpo", "The same, with branches that are finished in several step lengths.", G2RPO
    )
    branch: Count = option(12, "Children of a fan.", G2RPO)
    splits: Steps | None = option(None, FIRST_HALF, "all of the first half in the paper")

    def preset_arguments(self, iteration: int, steps: int, seed: int) -> dict[str, Any]:
        return _fan_arguments(self, iteration, steps, seed)


class EGRPOOptions(SiblingOptions):
    """Trunks with fans whose noisy step merges several steps."""

    title: ClassVar[str] = "E-GRPO"
    credit: ClassVar[str] = "{edges: fan, scope: leaf, scale: std}"
    kind: Literal["e_grpo"] = option("e_grpo", "Trunks with fans of merged steps.", E_GRPO)
    branch: Count = option(12, "Children of a fan.", E_GRPO)
    splits: Steps | None = option(None, FIRST_HALF, "all of the first half in the paper")

    def preset_arguments(self, iteration: int, steps: int, seed: int) -> dict[str, Any]:
        return _fan_arguments(self, iteration, steps, seed)


def _fan_arguments(
    options: G2RPOOptions | EGRPOOptions, iteration: int, steps: int, seed: int
) -> dict[str, Any]:
    arguments = options._fields()
    if arguments["splits"] is None:
        arguments["splits"] = [random_step(steps // 2, seed, iteration)]
    return arguments


class CustomTreeOptions(TreeOptions):
    """A plan of your own."""

    title: ClassVar[str] = "GRPO"
    kind: Literal["custom"] = option("custom", "A plan of your own.")
    function: Text = option(
        ...,
        "What makes it, as module:attribute: called with iteration, steps, leaves, seed and args, "
        "it returns a TreePlan.",
    )
    args: dict[str, Any] = option({}, "Further arguments of the function, by name.")

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return presets.custom(steps, leaves, **self._fields(), iteration=iteration, seed=seed)


Tree = Annotated[
    ODEOptions
    | FlowGRPOOptions
    | FlowGRPOFastOptions
    | DanceGRPOOptions
    | MixGRPOOptions
    | BranchGRPOOptions
    | BranchGRPOMixOptions
    | TreeGRPOOptions
    | B2DiffuRLOptions
    | TempFlowOptions
    | G2RPOOptions
    | EGRPOOptions
    | CustomTreeOptions,
    Field(discriminator="kind"),
]
PRESETS: dict[str, type[TreeOptions]] = {
    section.model_fields["kind"].default: section for section in get_args(get_args(Tree)[0])
}

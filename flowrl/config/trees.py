"""The options of a rollout's trees: forests and combs by their kind, and depth pruning."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flowrl.trees import presets, windows
from flowrl.trees import presets as combs
from flowrl.trees import presets as custom
from flowrl.trees.plan import CouplingKind, PlanError, TreePlan
from flowrl.trees.plan import NoiseCoupling as PlanCoupling
from flowrl.utils.fields import Count, Flag, NonNegative, Number, Options, Text, Whole, option

# --- The options of windows: which steps are stochastic or trained, as training goes on --------

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
MIX_GRPO = "MixGRPO, arXiv 2507.21802"
TREE_GRPO = "TreeGRPO, arXiv 2512.08153"
BRANCH_GRPO = "BranchGRPO, arXiv 2509.06040"
SIZE = "How many steps the window covers."


class AllStepsOptions(Options):
    """Every step but the last."""

    kind: Literal["all"] = option("all", "Every step but the last.", FLOW_GRPO)


class FixedWindow(Options):
    """The same steps in every rollout."""

    kind: Literal["fixed"] = option(
        "fixed", "The window never moves.", "MixGRPO-Flash*, 2507.21802"
    )
    size: Count = option(..., SIZE)
    start: Whole = option(0, "First step of the window, counted from 0 at pure noise.")


class RandomWindow(Options):
    """A stretch that is drawn anew for every rollout."""

    kind: Literal["random"] = option(
        "random", "The window is drawn for every rollout.", "Flow-GRPO-Fast, second version"
    )
    size: Count = option(..., SIZE, "published: 2 or 3")
    start: Whole = option(0, "First step that the window may cover.")
    stop: Count | None = option(
        None,
        "The window ends before this step; null is steps - 1, since the last step has no noise.",
        "published: half of the steps",
    )


class ProgressiveWindow(Options):
    """A stretch that moves from pure noise towards the image."""

    kind: Literal["progressive"] = option(
        "progressive", "The window moves on as training goes.", MIX_GRPO
    )
    size: Count = option(4, SIZE, MIX_GRPO)
    period: Count = option(25, "Iterations between two moves by one step.", MIX_GRPO)
    start: Whole = option(0, "Where the window begins, and begins again after the end.")
    stop: Count | None = option(
        None,
        "The window ends before this step; null is steps - 1.",
        "MixGRPO lets it shrink; here not",
    )


class GeometricWindow(Options):
    """A stretch drawn anew for every rollout, early ones more often."""

    kind: Literal["geometric"] = option(
        "geometric", "The window's first step is drawn, with less chance the later.", TREE_GRPO
    )
    size: Count = option(3, SIZE, TREE_GRPO)
    ratio: Annotated[Number, Field(gt=0, le=1)] = option(
        0.5,
        "Chance of a first step divided by that of the step before; 1 is uniform.",
        "TreeGRPO: 0.5; 0.3 favours aesthetics, 0.7 agreement with the text",
    )


Window = Annotated[
    AllStepsOptions | FixedWindow | RandomWindow | ProgressiveWindow | GeometricWindow,
    Field(discriminator="kind"),
]


def window_at(
    window: Window, *, iteration: int, steps: int, seed: int, path: str = "rollout.tree.window"
) -> range:
    """The steps that a window covers; path: of the window among the options.

    Raises PlanError with the option's name for what cannot work.
    """
    _check(window, steps, path)
    match window:
        case FixedWindow():
            found = windows.FixedWindow(size=window.size, start=window.start)
        case RandomWindow():
            found = windows.RandomWindow(
                size=window.size, start=window.start, stop=window.stop, seed=seed
            )
        case ProgressiveWindow():
            found = windows.ProgressiveWindow(
                size=window.size, period=window.period, start=window.start, stop=window.stop
            )
        case GeometricWindow():
            found = windows.GeometricWindow(size=window.size, ratio=window.ratio, seed=seed)
        case _:
            found = windows.all_steps
    return found(iteration, steps)


def _check(window: Window, steps: int, path: str) -> None:
    """The last step has no noise and is never trained, so windows end at steps - 1."""
    last = steps - 1
    if last < 1:
        raise PlanError(
            f"rollout.steps is {steps}, expected at least 2: the last step has no noise"
        )
    if isinstance(window, AllStepsOptions):
        return
    start = 0 if isinstance(window, GeometricWindow) else window.start
    given = window.stop if isinstance(window, (RandomWindow, ProgressiveWindow)) else None
    stop = last if given is None else given
    if stop > last:
        raise PlanError(
            f"{path}.stop is {stop}, but the window must end before the last of {steps} steps: the "
            f"nearest valid value is {last}"
        )
    if start >= stop:
        raise PlanError(
            f"{path}.start is {start}, but the window must end at step {stop}: the nearest valid "
            f"value is {max(stop - window.size, 0)}"
        )
    if window.size > stop - start:
        raise PlanError(
            f"{path}.size is {window.size}, but {stop - start} is all there is from step {start} "
            f"to {stop} (the last of {steps} steps has no noise): the nearest valid value is "
            f"{stop - start}"
        )


# --- The options of forests: one section a published algorithm, each of which makes a plan -----

DANCE_GRPO = "DanceGRPO, arXiv 2505.07818"
DYNAMIC_TREE = "Dynamic-TreeRPO, arXiv 2509.23352"
B2_DIFFURL = "B2-DiffuRL, arXiv 2503.11240"
INSIDE = "Which steps are stochastic and trained; kind: all, fixed, random, progressive, geometric."

Share = Annotated[Number, Field(gt=0, le=1)]


class CouplingOptions(Options):
    """How the noises of siblings depend on each other."""

    kind: CouplingKind = option(
        "independent",
        "independent; shared: a common part; simplex: as different as possible, with the same law "
        "of each; antithetic: in opposite pairs; scaled: a multiple of the noise.",
    )
    strength: NonNegative = option(
        1.0,
        "shared: weight of a sibling's own part beside the common one; scaled: the factor.",
        "BranchGRPO: 4",
    )

    def plan(self) -> PlanCoupling:
        return PlanCoupling(self.kind, self.strength)


SIBLINGS = "How the noises of siblings depend on each other: {kind, strength}."
SHARED = CouplingOptions(
    kind=presets.BRANCH_COUPLING.kind, strength=presets.BRANCH_COUPLING.strength
)
SIMPLEX = "independent in the paper; simplex loses none of the gradient to the group's mean"


class ODEOptions(Options):
    """Independent chains without noise: the pipeline's own sampler."""

    kind: Literal["ode"] = option(
        "ode", "Independent chains without noise, for objectives that learn from images."
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return presets.ode(steps, leaves)


class FlowGRPOOptions(Options):
    """Independent chains with noise in every step but the last."""

    kind: Literal["flow_grpo"] = option("flow_grpo", "Independent chains.", FLOW_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return presets.flow_grpo(steps, leaves)


class FlowGRPOFastOptions(Options):
    """Independent chains, stochastic in a window only."""

    kind: Literal["flow_grpo_fast"] = option(
        "flow_grpo_fast", "Independent chains, stochastic in a window.", "Flow-GRPO-Fast"
    )
    window: Window = option(RandomWindow(size=2), INSIDE, "Flow-GRPO-Fast, second version")

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.flow_grpo_fast(steps, leaves, window)


class DanceGRPOOptions(Options):
    """Chains from one initial noise, of which a random share of steps is trained."""

    kind: Literal["dance_grpo"] = option("dance_grpo", "Chains from one noise.", DANCE_GRPO)
    trained_share: Share = option(
        0.6, "Share of the stochastic steps that is trained, drawn for every rollout.", DANCE_GRPO
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        trained = windows.step_subset(steps, self.trained_share, seed, iteration)
        return presets.dance_grpo(steps, leaves, trained)


class MixGRPOOptions(Options):
    """Chains from one initial noise, stochastic in a moving window only."""

    kind: Literal["mix_grpo"] = option("mix_grpo", "One trunk up to the window.", MIX_GRPO)
    window: Window = option(ProgressiveWindow(size=4, period=25), INSIDE, MIX_GRPO)
    shared_prefix: Flag = option(
        True, "Draw the steps before the window once, since all images of a prompt share them."
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.mix_grpo(steps, leaves, window, self.shared_prefix)


class BranchGRPOOptions(Options):
    """Trees with noise in every step but the last, which branch at chosen steps."""

    kind: Literal["branch_grpo"] = option("branch_grpo", "Trees, all stochastic.", BRANCH_GRPO)
    branch: Annotated[Count, Field(ge=2)] = option(2, "Children at a split.", BRANCH_GRPO)
    splits: list[Whole] = option([0, 3, 6, 9], "Steps at which to branch.", f"{BRANCH_GRPO}: dense")
    coupling: CouplingOptions = option(SHARED, SIBLINGS, BRANCH_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        coupling = self.coupling.plan()
        return presets.branch_grpo(steps, leaves, self.branch, self.splits, coupling)


class BranchGRPOMixOptions(Options):
    """Trees with noise at the splits and in a moving window only."""

    kind: Literal["branch_grpo_mix"] = option(
        "branch_grpo_mix", "Trees, stochastic at the splits and in a window.", BRANCH_GRPO
    )
    branch: Annotated[Count, Field(ge=2)] = option(2, "Children at a split.", BRANCH_GRPO)
    splits: list[Whole] = option([0, 3, 6, 9], "Steps at which to branch.", f"{BRANCH_GRPO}: dense")
    window: Window = option(
        ProgressiveWindow(size=4, period=30),
        "Which steps are stochastic beside the splits.",
        BRANCH_GRPO,
    )
    coupling: CouplingOptions = option(SHARED, SIBLINGS, BRANCH_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        coupling = self.coupling.plan()
        return presets.branch_grpo_mix(steps, leaves, self.branch, self.splits, window, coupling)


class TreeGRPOOptions(Options):
    """Trees that branch at each step of a window, ODE elsewhere."""

    kind: Literal["tree_grpo"] = option("tree_grpo", "Trees in a window.", TREE_GRPO)
    branch: Annotated[Count, Field(ge=2)] = option(3, "Children at a step.", TREE_GRPO)
    window: Window = option(GeometricWindow(size=3, ratio=0.5), "Which steps branch.", TREE_GRPO)
    coupling: CouplingOptions = option(CouplingOptions(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.tree_grpo(steps, leaves, self.branch, window, self.coupling.plan())


class DynamicTreeOptions(Options):
    """Binary trees in a window whose noise grows with the depth."""

    kind: Literal["dynamic_tree"] = option("dynamic_tree", "Binary trees.", DYNAMIC_TREE)
    window: Window = option(
        ProgressiveWindow(size=4, period=25), "Which steps branch.", DYNAMIC_TREE
    )
    gain_growth: NonNegative = option(
        0.0,
        "Growth b of the noise: its strength is multiplied by 1 + b k / size at depth k of the "
        "window.",
        "Dynamic-TreeRPO: linear; its exact formula and value could not be compared",
    )
    coupling: CouplingOptions = option(CouplingOptions(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        coupling = self.coupling.plan()
        return presets.dynamic_tree(steps, leaves, window, self.gain_growth, coupling)


class B2DiffuRLOptions(Options):
    """A stochastic trunk and continuations, whose trained part grows backwards."""

    kind: Literal["b2_diffurl"] = option("b2_diffurl", "Continuations of a trunk.", B2_DIFFURL)
    branch: Annotated[Count, Field(ge=2)] = option(5, "Continuations of a trunk.", B2_DIFFURL)
    first: Share = option(0.7, "Share of the steps that is trained at first.", "14 of 20 steps")
    last: Share = option(1.0, "Share of the steps that is trained at the end.", "20 of 20 steps")
    period: Count = option(
        100, "Iterations in which it grows from the first to the last.", B2_DIFFURL
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        if self.first > self.last:
            raise PlanError(
                f"rollout.tree.first is {self.first}, but the trained part grows to "
                f"rollout.tree.last, {self.last}: the nearest that works is {self.last}"
            )
        ends = [max(2, round(share * steps)) for share in (self.first, self.last)]
        trained = presets.b2_stage(iteration, self.period, *ends)
        return presets.b2_diffurl(steps, leaves, self.branch, trained)


# --- The options of a rollout's trees: forests and combs by their kind, and depth pruning ------

TEMPFLOW = "TempFlow-GRPO, arXiv 2508.04324"
G2RPO = "G2RPO, arXiv 2510.01982"
E_GRPO = "E-GRPO, arXiv 2601.00423"


class TempFlowOptions(Options):
    """Trunks without noise, with a fan of one noisy step at every step."""

    kind: Literal["tempflow"] = option("tempflow", "Trunks with fans.", TEMPFLOW)
    width: Count = option(6, "Children of a fan.", TEMPFLOW)
    at: list[Whole] | None = option(None, "Steps with a fan; null is all but the last.", TEMPFLOW)
    coupling: CouplingOptions = option(CouplingOptions(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return combs.tempflow(steps, leaves, self.width, self.at, self.coupling.plan())


DRAW = "Steps of `at` that get a fan, drawn for every rollout; null is all of them, far more work."


class G2RPOOptions(Options):
    """Trunks with fans whose children are finished several times, coarsely and finely."""

    kind: Literal["g2rpo"] = option("g2rpo", "Trunks with fans of several strides.", G2RPO)
    width: Count = option(12, "Children of a fan.", G2RPO)
    at: list[Whole] | None = option(None, "Steps with a fan; null is the first half.", G2RPO)
    draw: Count | None = option(1, DRAW, "all of them in the paper")
    strides: list[Count] = option(
        [1, 2, 3], "Every child is finished once in moves of so many steps.", G2RPO
    )
    coupling: CouplingOptions = option(CouplingOptions(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        at = combs.first_half(steps) if self.at is None else self.at
        at = windows.draw_steps(presets.check_steps("at", at, steps), self.draw, seed, iteration)
        return combs.g2rpo(steps, leaves, self.width, at, self.strides, self.coupling.plan())


class EGRPOOptions(Options):
    """Trunks with fans whose noisy step merges several steps."""

    kind: Literal["e_grpo"] = option("e_grpo", "Trunks with fans of merged steps.", E_GRPO)
    width: Count = option(12, "Children of a fan.", E_GRPO)
    at: list[Whole] | None = option(None, "Steps with a fan; null is the first half.", E_GRPO)
    draw: Count | None = option(1, DRAW, "all of them in the paper")
    lengths: list[Count] = option([1, 2], "A fan for each merges so many steps.", E_GRPO)
    coupling: CouplingOptions = option(CouplingOptions(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        at = combs.first_half(steps) if self.at is None else self.at
        presets.check_steps("at", at, steps)
        if self.draw is not None:
            combs.check_alike(steps, at, self.lengths)
        at = windows.draw_steps(at, self.draw, seed, iteration)
        return combs.e_grpo(steps, leaves, self.width, at, self.lengths, self.coupling.plan())


class CustomTreeOptions(Options):
    """A plan of your own."""

    kind: Literal["custom"] = option("custom", "A plan of your own.")
    function: Text = option(
        ...,
        "What makes it, as module:attribute: called with iteration, steps, leaves, seed and args, "
        "it returns a TreePlan.",
    )
    args: dict[str, Any] = option({}, "Further arguments of the function, by name.")

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return custom.custom_plan(
            self.function, self.args, iteration=iteration, steps=steps, leaves=leaves, seed=seed
        )


PRESETS: dict[str, type[Options]] = {
    "ode": ODEOptions,
    "flow_grpo": FlowGRPOOptions,
    "flow_grpo_fast": FlowGRPOFastOptions,
    "dance_grpo": DanceGRPOOptions,
    "mix_grpo": MixGRPOOptions,
    "branch_grpo": BranchGRPOOptions,
    "branch_grpo_mix": BranchGRPOMixOptions,
    "tree_grpo": TreeGRPOOptions,
    "dynamic_tree": DynamicTreeOptions,
    "b2_diffurl": B2DiffuRLOptions,
    "tempflow": TempFlowOptions,
    "g2rpo": G2RPOOptions,
    "e_grpo": EGRPOOptions,
    "custom": CustomTreeOptions,
}
# What a method's paper or code has under objective.credit, where it differs from the defaults; and
# the scale in any case, since recipes set another.
PUBLISHED_CREDIT = {
    "flow_grpo": "{scale: global}",
    "flow_grpo_fast": "{scale: std}",
    "dance_grpo": "{scale: std, ddof: 1, floor: 1e-8}",
    "mix_grpo": "{scale: std, ddof: 1, floor: 1e-8}",
    "branch_grpo": "{scope: depth, scale: std, ddof: 1, floor: 1e-8}",
    "branch_grpo_mix": "{scope: depth, scale: std, ddof: 1, floor: 1e-8}",
    "tree_grpo": "{fusion: local, scale: std}",
    "b2_diffurl": "{scale: std, floor: 1e-8, keep: {kind: b2_pairs}}",
    "tempflow": "{edges: fan, scope: leaf, scale: std}",
    "g2rpo": "{edges: fan, scope: leaf, scale: std}",
    "e_grpo": "{edges: fan, scope: leaf, scale: std}",
}
Tree = Annotated[
    ODEOptions
    | FlowGRPOOptions
    | FlowGRPOFastOptions
    | DanceGRPOOptions
    | MixGRPOOptions
    | BranchGRPOOptions
    | BranchGRPOMixOptions
    | TreeGRPOOptions
    | DynamicTreeOptions
    | B2DiffuRLOptions
    | TempFlowOptions
    | G2RPOOptions
    | EGRPOOptions
    | CustomTreeOptions,
    Field(discriminator="kind"),
]


class DepthPruning(Options):
    """Steps that are drawn but not learned from, moving as training goes."""

    start: Whole = option(
        9, "First step without gradient at first.", "BranchGRPO: its last split, of 20 steps"
    )
    size: Count = option(4, "How many steps get no gradient.", BRANCH_GRPO)
    direction: Literal["later", "earlier"] = option(
        "later",
        "Where the steps move.",
        "later in the paper as quoted, earlier in the published code",
    )
    period: Count = option(30, "Iterations between two moves by one step.", BRANCH_GRPO)
    stop: Whole | None = option(
        None,
        "First step without gradient at the end; null: where the last step with noise is reached, "
        "or step 0.",
    )
    until: Count | None = option(
        None, "Iteration from which every step is learned from again; null is never."
    )

    def at(self, iteration: int, steps: int) -> range:
        """The steps without gradient in one iteration. Raises PlanError for steps without noise.

        Without `stop`, later steps end with the last that has noise, earlier ones at step 0.
        """
        last = steps - 2
        for name, value in (("start", self.start), ("stop", self.stop)):
            if value is not None and value > last:
                raise PlanError(
                    f"rollout.depth_pruning.{name} is {value}, but noise is possible in steps 0 to "
                    f"{last}, never in the last: the nearest that works is {last}"
                )
        room = steps - 1 - max(self.start, self.stop or 0)
        if self.size > room:
            raise PlanError(
                f"rollout.depth_pruning.size is {self.size}, but its window then reaches beyond "
                f"step {last}, the last with noise: the nearest that works is {room}"
            )
        end = steps - 1 - self.size
        return windows.DepthPruning(
            start=self.start,
            size=self.size,
            direction=1 if self.direction == "later" else -1,
            period=self.period,
            stop=end if self.stop is None and self.direction == "later" else self.stop,
            until=self.until,
        )(iteration)

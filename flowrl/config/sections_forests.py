"""The options of forests: one section a published algorithm, each of which makes a plan."""

from typing import Annotated, Literal

from pydantic import Field

from flowrl.config.sections_windows import (
    BRANCH_GRPO,
    FLOW_GRPO,
    MIX_GRPO,
    TREE_GRPO,
    GeometricWindow,
    ProgressiveWindow,
    RandomWindow,
    Window,
    window_at,
)
from flowrl.trees import presets, windows
from flowrl.trees.plan import Coupling as PlanCoupling
from flowrl.trees.plan import CouplingKind, PlanError, TreePlan
from flowrl.utils.fields import Count, Flag, NonNegative, Number, Section, Whole, option

DANCE_GRPO = "DanceGRPO, arXiv 2505.07818"
DYNAMIC_TREE = "Dynamic-TreeRPO, arXiv 2509.23352"
B2_DIFFURL = "B2-DiffuRL, arXiv 2503.11240"
INSIDE = "Which steps are stochastic and trained; kind: all, fixed, random, progressive, geometric."

Share = Annotated[Number, Field(gt=0, le=1)]


class Coupling(Section):
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
SHARED = Coupling(kind=presets.BRANCH_COUPLING.kind, strength=presets.BRANCH_COUPLING.strength)
SIMPLEX = "independent in the paper; simplex loses none of the gradient to the group's mean"


class Ode(Section):
    """Independent chains without noise: the pipeline's own sampler."""

    kind: Literal["ode"] = option(
        "ode", "Independent chains without noise, for objectives that learn from pictures."
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return presets.ode(steps, leaves)


class FlowGrpo(Section):
    """Independent chains with noise in every step but the last."""

    kind: Literal["flow_grpo"] = option("flow_grpo", "Independent chains.", FLOW_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return presets.flow_grpo(steps, leaves)


class FlowGrpoFast(Section):
    """Independent chains, stochastic in a window only."""

    kind: Literal["flow_grpo_fast"] = option(
        "flow_grpo_fast", "Independent chains, stochastic in a window.", "Flow-GRPO-Fast"
    )
    window: Window = option(RandomWindow(size=2), INSIDE, "Flow-GRPO-Fast, second version")

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.flow_grpo_fast(steps, leaves, window)


class DanceGrpo(Section):
    """Chains from one initial noise, of which a random share of steps is trained."""

    kind: Literal["dance_grpo"] = option("dance_grpo", "Chains from one noise.", DANCE_GRPO)
    trained_share: Share = option(
        0.6, "Share of the stochastic steps that is trained, drawn for every rollout.", DANCE_GRPO
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        trained = windows.step_subset(steps, self.trained_share, seed, iteration)
        return presets.dance_grpo(steps, leaves, trained)


class MixGrpo(Section):
    """Chains from one initial noise, stochastic in a moving window only."""

    kind: Literal["mix_grpo"] = option("mix_grpo", "One trunk up to the window.", MIX_GRPO)
    window: Window = option(ProgressiveWindow(size=4, period=25), INSIDE, MIX_GRPO)
    shared_prefix: Flag = option(
        True, "Draw the steps before the window once, since all pictures of a prompt share them."
    )

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.mix_grpo(steps, leaves, window, self.shared_prefix)


class BranchGrpo(Section):
    """Trees with noise in every step but the last, which branch at chosen steps."""

    kind: Literal["branch_grpo"] = option("branch_grpo", "Trees, all stochastic.", BRANCH_GRPO)
    branch: Annotated[Count, Field(ge=2)] = option(2, "Children at a split.", BRANCH_GRPO)
    splits: list[Whole] = option([0, 3, 6, 9], "Steps at which to branch.", f"{BRANCH_GRPO}: dense")
    coupling: Coupling = option(SHARED, SIBLINGS, BRANCH_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        coupling = self.coupling.plan()
        return presets.branch_grpo(steps, leaves, self.branch, self.splits, coupling)


class BranchGrpoMix(Section):
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
    coupling: Coupling = option(SHARED, SIBLINGS, BRANCH_GRPO)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        coupling = self.coupling.plan()
        return presets.branch_grpo_mix(steps, leaves, self.branch, self.splits, window, coupling)


class TreeGrpo(Section):
    """Trees that branch at each step of a window, ODE elsewhere."""

    kind: Literal["tree_grpo"] = option("tree_grpo", "Trees in a window.", TREE_GRPO)
    branch: Annotated[Count, Field(ge=2)] = option(3, "Children at a step.", TREE_GRPO)
    window: Window = option(GeometricWindow(size=3, ratio=0.5), "Which steps branch.", TREE_GRPO)
    coupling: Coupling = option(Coupling(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        return presets.tree_grpo(steps, leaves, self.branch, window, self.coupling.plan())


class DynamicTree(Section):
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
    coupling: Coupling = option(Coupling(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        window = window_at(self.window, iteration=iteration, steps=steps, seed=seed)
        coupling = self.coupling.plan()
        return presets.dynamic_tree(steps, leaves, window, self.gain_growth, coupling)


class B2DiffuRL(Section):
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

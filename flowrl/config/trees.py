"""The options of a rollout's trees: forests and combs by their kind, and depth pruning."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flowrl.config.sections_forests import (
    SIBLINGS,
    SIMPLEX,
    B2DiffuRL,
    BranchGrpo,
    BranchGrpoMix,
    Coupling,
    DanceGrpo,
    DynamicTree,
    FlowGrpo,
    FlowGrpoFast,
    MixGrpo,
    Ode,
    TreeGrpo,
)
from flowrl.config.sections_windows import BRANCH_GRPO
from flowrl.trees import combs, custom, presets, windows
from flowrl.trees.plan import PlanError, TreePlan
from flowrl.utils.fields import Count, Section, Text, Whole, option

TEMPFLOW = "TempFlow-GRPO, arXiv 2508.04324"
G2RPO = "G2RPO, arXiv 2510.01982"
E_GRPO = "E-GRPO, arXiv 2601.00423"


class TempFlow(Section):
    """Trunks without noise, with a fan of one noisy step at every step."""

    kind: Literal["tempflow"] = option("tempflow", "Trunks with fans.", TEMPFLOW)
    width: Count = option(6, "Children of a fan.", TEMPFLOW)
    at: list[Whole] | None = option(None, "Steps with a fan; null is all but the last.", TEMPFLOW)
    coupling: Coupling = option(Coupling(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        return combs.tempflow(steps, leaves, self.width, self.at, self.coupling.plan())


DRAW = "Steps of `at` that get a fan, drawn for every rollout; null is all of them, far more work."


class G2rpo(Section):
    """Trunks with fans whose children are finished several times, coarsely and finely."""

    kind: Literal["g2rpo"] = option("g2rpo", "Trunks with fans of several strides.", G2RPO)
    width: Count = option(12, "Children of a fan.", G2RPO)
    at: list[Whole] | None = option(None, "Steps with a fan; null is the first half.", G2RPO)
    draw: Count | None = option(1, DRAW, "all of them in the paper")
    strides: list[Count] = option(
        [1, 2, 3], "Every child is finished once in moves of so many steps.", G2RPO
    )
    coupling: Coupling = option(Coupling(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        at = combs.first_half(steps) if self.at is None else self.at
        at = windows.draw_steps(presets.check_steps("at", at, steps), self.draw, seed, iteration)
        return combs.g2rpo(steps, leaves, self.width, at, self.strides, self.coupling.plan())


class EGrpo(Section):
    """Trunks with fans whose noisy step merges several steps."""

    kind: Literal["e_grpo"] = option("e_grpo", "Trunks with fans of merged steps.", E_GRPO)
    width: Count = option(12, "Children of a fan.", E_GRPO)
    at: list[Whole] | None = option(None, "Steps with a fan; null is the first half.", E_GRPO)
    draw: Count | None = option(1, DRAW, "all of them in the paper")
    lengths: list[Count] = option([1, 2], "A fan for each merges so many steps.", E_GRPO)
    coupling: Coupling = option(Coupling(), SIBLINGS, SIMPLEX)

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        at = combs.first_half(steps) if self.at is None else self.at
        presets.check_steps("at", at, steps)
        if self.draw is not None:
            combs.check_alike(steps, at, self.lengths)
        at = windows.draw_steps(at, self.draw, seed, iteration)
        return combs.e_grpo(steps, leaves, self.width, at, self.lengths, self.coupling.plan())


class Custom(Section):
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


PRESETS: dict[str, type[Section]] = {
    "ode": Ode,
    "flow_grpo": FlowGrpo,
    "flow_grpo_fast": FlowGrpoFast,
    "dance_grpo": DanceGrpo,
    "mix_grpo": MixGrpo,
    "branch_grpo": BranchGrpo,
    "branch_grpo_mix": BranchGrpoMix,
    "tree_grpo": TreeGrpo,
    "dynamic_tree": DynamicTree,
    "b2_diffurl": B2DiffuRL,
    "tempflow": TempFlow,
    "g2rpo": G2rpo,
    "e_grpo": EGrpo,
    "custom": Custom,
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
    Ode
    | FlowGrpo
    | FlowGrpoFast
    | DanceGrpo
    | MixGrpo
    | BranchGrpo
    | BranchGrpoMix
    | TreeGrpo
    | DynamicTree
    | B2DiffuRL
    | TempFlow
    | G2rpo
    | EGrpo
    | Custom,
    Field(discriminator="kind"),
]


class DepthPruning(Section):
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

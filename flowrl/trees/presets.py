"""The trees of published methods: one class each, with its options and the plan that they make.

A recipe names a class by its `kind`. Plans raise PlanError when the number of images (the option
group_size) cannot be reached, or when a step that should have noise lies outside 0..steps - 2: the
last step never has noise.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from flowrl.trees.plan import INDEPENDENT, Fan, NoiseCoupling, PlanError, Step, TreePlan, count
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
from flowrl.utils.imports import load_callable

DANCE_GRPO = "DanceGRPO, arXiv 2505.07818"
B2_DIFFURL = "B2-DiffuRL, arXiv 2503.11240"
TEMPFLOW = "TempFlow-GRPO, arXiv 2508.04324"
G2RPO = "G2RPO, arXiv 2510.01982"
E_GRPO = "E-GRPO, arXiv 2601.00423"
INSIDE = "Which steps are stochastic and trained; kind: all, fixed, random, progressive, geometric."
SIBLINGS = "Dependence between the noises of siblings: {kind, strength}."
SIMPLEX = "independent in the paper; simplex loses none of the gradient to the group's mean"
SPLITS = "Steps at which to branch."
FIRST_HALF = "Steps with a split; null is a random one of the first half in each rollout."
MAX_MOVES = 20_000  # of one tree
BRANCH_COUPLING = NoiseCoupling(kind="shared", strength=4.0)  # BranchGRPO's Eq. 2 with its s
DANCE_SHARE = 0.6  # of the stochastic steps is trained
B2_FIRST = 0.7  # of the steps is trained at first: 14 of 20
B2_PERIOD = 100  # iterations over which the trained steps grow from there to all
G2RPO_STRIDES = (1, 2, 3)  # every child is finished once in moves of so many steps
E_GRPO_LENGTHS = (1, 2)  # steps that a fan's noisy step merges, a fan for each

Branch = Annotated[Count, Field(ge=2)]
Steps = Annotated[tuple[Whole, ...], Field(max_length=1000)]


class TreeOptions(Options):
    """Options of one method's trees."""

    title: ClassVar[str]  # as papers call it
    # What its paper or code has under objective.advantage where it differs from the defaults, and
    # the scale in any case, since recipes set another.
    credit: ClassVar[str] = ""

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        """Return what one rollout of an iteration does: `leaves` images of a prompt."""
        this: Any = self  # frozen, hence hashable
        return _made(this, steps, leaves, self.at(iteration, steps, seed))

    @property
    def static(self) -> bool:
        """Whether every iteration has the same plan, which nobody knows of a function."""
        window, kind = getattr(self, "window", None), type(self)
        still = window is None or window.kind in ("all", "fixed")
        return still and (kind.at, kind.plan) == (TreeOptions.at, TreeOptions.plan)

    def at(self, iteration: int, steps: int, seed: int) -> Any:
        """Return what of the plan depends on the iteration: the steps of the window, if any."""
        window = getattr(self, "window", None)
        return None if window is None else window.steps(iteration, steps, seed)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        """Return the plan of so many steps and images; at: what `at` returns."""
        raise NotImplementedError


@functools.lru_cache(maxsize=1024)  # a recipe's check plans every iteration, and few differ
def _made(options: Any, steps: int, leaves: int, at: Any) -> TreePlan:
    return options.make(steps, leaves, at)


# --- chains --------------------------------------------------------------------------------------


class ODEOptions(TreeOptions):
    """Independent chains without noise: the pipeline's own sampler."""

    title: ClassVar[str] = "GRPO"
    kind: Literal["ode"] = option(
        "ode", "Independent chains without noise, for objectives that learn from images."
    )

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return chains(steps, leaves, noisy=())


class FlowGRPOOptions(TreeOptions):
    """Independent chains with noise in every step but the last."""

    title: ClassVar[str] = "Flow-GRPO"
    credit: ClassVar[str] = "{scale: global}"
    kind: Literal["flow_grpo"] = option("flow_grpo", "Independent chains.", FLOW_GRPO)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return chains(steps, leaves, noisy=range(steps - 1))


class FlowGRPOFastOptions(TreeOptions):
    """Independent chains, stochastic in a window only."""

    title: ClassVar[str] = "Flow-GRPO-Fast"
    credit: ClassVar[str] = "{scale: std}"
    kind: Literal["flow_grpo_fast"] = option(
        "flow_grpo_fast", "Independent chains, stochastic in a window.", "Flow-GRPO-Fast"
    )
    window: Window = option(RandomWindow(size=2), INSIDE, "Flow-GRPO-Fast, second version")

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return chains(steps, leaves, noisy=at)


class DanceGRPOOptions(TreeOptions):
    """Chains from one initial noise; a random 60 % of the stochastic steps are trained."""

    title: ClassVar[str] = "DanceGRPO"
    credit: ClassVar[str] = "{scale: std}"
    kind: Literal["dance_grpo"] = option("dance_grpo", "Chains from one noise.", DANCE_GRPO)

    def at(self, iteration: int, steps: int, seed: int) -> frozenset[int]:
        return random_share(steps, DANCE_SHARE, seed, iteration)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return chains(steps, leaves, range(steps - 1), trained=at, same_noise=True)


class MixGRPOOptions(TreeOptions):
    """Chains from one initial noise, stochastic in a moving window only.

    Up to the window all images of a prompt are equal: this part is sampled once, as the trunk of
    one tree.
    """

    title: ClassVar[str] = "MixGRPO"
    credit: ClassVar[str] = "{scale: std}"
    kind: Literal["mix_grpo"] = option("mix_grpo", "One trunk up to the window.", MIX_GRPO)
    window: Window = option(ProgressiveWindow(size=4, period=25), INSIDE, MIX_GRPO)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        check_leaves(leaves)
        return TreePlan(roots=1, steps=_forest(steps, at, at, {at[0]: leaves}))


# --- trees ---------------------------------------------------------------------------------------


class SiblingOptions(TreeOptions):
    """Options of trees whose nodes have several noisy children."""

    coupling: NoiseCoupling = option(NoiseCoupling(), SIBLINGS, SIMPLEX)


class BranchGRPOOptions(SiblingOptions):
    """Trees with noise in every step but the last, which branch at chosen steps."""

    title: ClassVar[str] = "BranchGRPO"
    credit: ClassVar[str] = "{scope: depth, scale: std}"
    kind: Literal["branch_grpo"] = option("branch_grpo", "Trees, all stochastic.", BRANCH_GRPO)
    branch: Branch = option(2, "Children at a split.", BRANCH_GRPO)
    splits: Steps = option((0, 3, 6, 9), SPLITS, f"{BRANCH_GRPO}: dense")
    coupling: NoiseCoupling = option(BRANCH_COUPLING, SIBLINGS, BRANCH_GRPO)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return self.branching(steps, leaves, range(steps - 1))

    def branching(self, steps: int, leaves: int, noisy: Iterable[int]) -> TreePlan:
        """Return trees with noise in these steps.

        Steps before the first split of a single tree are not trained: one node a depth has nothing
        to be compared with.
        """
        check_steps("splits", self.splits, steps)
        roots = _roots_of_power(leaves, self.branch, len(self.splits))
        trained = {i for i in noisy if roots > 1 or i >= min(self.splits)}
        parts = dict.fromkeys(self.splits, self.branch)
        return TreePlan(roots=roots, steps=_forest(steps, noisy, trained, parts, self.coupling))


class BranchGRPOMixOptions(BranchGRPOOptions):
    """Trees with noise at the splits and in a moving window only."""

    title: ClassVar[str] = "BranchGRPO-Mix"
    credit: ClassVar[str] = "{scope: depth, scale: std}"
    kind: Literal["branch_grpo_mix"] = option(
        "branch_grpo_mix", "Trees, stochastic at the splits and in a window.", BRANCH_GRPO
    )
    window: Window = option(
        ProgressiveWindow(size=4, period=30),
        "Which steps are stochastic beside the splits.",
        BRANCH_GRPO,
    )

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        return self.branching(steps, leaves, {*self.splits, *at})


class TreeGRPOOptions(SiblingOptions):
    """Trees that branch at each step of a window, ODE elsewhere.

    With w steps of the window from step i, a tree takes i + sum_{j<w} k^j + k^w (T - i - w)
    forwards. Siblings are independent in the paper; simplex coupling keeps the same law of each
    image and loses none of the gradient to the group's mean.
    """

    title: ClassVar[str] = "TreeGRPO"
    credit: ClassVar[str] = "{fusion: local, scale: std}"
    kind: Literal["tree_grpo"] = option("tree_grpo", "Trees in a window.", TREE_GRPO)
    branch: Branch = option(3, "Children at a step.", TREE_GRPO)
    window: Window = option(GeometricWindow(size=3, ratio=0.5), "Which steps branch.", TREE_GRPO)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        roots, parts = _roots_of_power(leaves, self.branch, len(at)), dict.fromkeys(at, self.branch)
        return TreePlan(roots=roots, steps=_forest(steps, at, at, parts, self.coupling))


class B2DiffuRLOptions(TreeOptions):
    """A stochastic trunk and continuations, whose trained part grows backwards.

    The continuations are trained, as far as they have noise. A tree takes
    (T - m) + K m - (K - 1) forwards, m the number of its last steps: the published (T - m) + K m
    counts the velocity at the branching once for every child.
    """

    title: ClassVar[str] = "B2-DiffuRL"
    credit: ClassVar[str] = "{scale: std, keep: b2_pairs}"
    kind: Literal["b2_diffurl"] = option("b2_diffurl", "Continuations of a trunk.", B2_DIFFURL)
    branch: Branch = option(5, "Continuations of a trunk.", B2_DIFFURL)

    def at(self, iteration: int, steps: int, seed: int) -> int:
        first, last = max(2, round(B2_FIRST * steps)), max(2, steps)
        return b2_stage(iteration, B2_PERIOD, first, last)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        split, roots = steps - at, _roots_of_power(leaves, self.branch, 1)
        noisy, trained = range(steps - 1), range(split, steps - 1)
        return TreePlan(roots=roots, steps=_forest(steps, noisy, trained, {split: self.branch}))


def b2_stage(iteration: int, stages: int, first: int, last: int) -> int:
    """Return how many last steps B2-DiffuRL trains at an iteration.

    m(j) = m_lo + floor(j (m_hi - m_lo + 1) / J) for j < J = stages, then m_hi.
    """
    if iteration >= stages:
        return last
    return first + iteration * (last - first + 1) // stages


# --- combs: trunks without noise, and fans of one noisy step each --------------------------------


class TempFlowOptions(SiblingOptions):
    """Trunks without noise, with a fan of one noisy step at every step.

    N trunks with fans of K take N (T - 1) + N K T (T - 1) / 2 forwards: a trunk ends where its last
    fan begins, which shares its velocity; the published N T counts a fan in the last step.
    """

    title: ClassVar[str] = "TempFlow-GRPO"
    credit: ClassVar[str] = "{edges: fan, scope: leaf, scale: std}"
    kind: Literal["tempflow"] = option(
        "tempflow", "ODE trajectories that branch into several images at some steps.", TEMPFLOW
    )
    branch: Count = option(6, "Children at each split.", TEMPFLOW)
    splits: Steps | None = option(None, "Steps with a split; null is all but the last.", TEMPFLOW)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        splits = range(steps - 1) if self.splits is None else self.splits
        check_steps("splits", splits, steps)
        fans = [Fan(step=k, width=self.branch, coupling=self.coupling) for k in splits]
        return _comb(steps, leaves, fans)


class _HalfCombOptions(SiblingOptions):
    """Options of combs whose fans are at some steps, or at a random one of the first half."""

    credit: ClassVar[str] = "{edges: fan, scope: leaf, scale: std}"
    branch: Count = option(12, "Children at each split.", f"{G2RPO}; {E_GRPO}")
    splits: Steps | None = option(None, FIRST_HALF, "all of the first half in the paper")

    def at(self, iteration: int, steps: int, seed: int) -> Steps:
        if self.splits is None:
            return (random_step(steps // 2, seed, iteration),)
        return self.splits


class G2RPOOptions(_HalfCombOptions):
    """Trunks with fans whose children are finished several times, coarsely and finely.

    The published cost of fans of G at steps k < M is
    M + G sum_k sum_lambda ceil((T - k - 1) / lambda), which counts a child's first velocity once
    for every stride; here the strides share it, which saves (number of strides - 1) G M.
    """

    title: ClassVar[str] = "G2RPO"
    kind: Literal["g2rpo"] = option(
        "g2rpo", "The same, with branches that are finished in several step lengths.", G2RPO
    )

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        check_steps("splits", at, steps)
        fans = [
            Fan(step=k, width=self.branch, strides=G2RPO_STRIDES, coupling=self.coupling)
            for k in at
        ]
        return _comb(steps, leaves, fans)


class EGRPOOptions(_HalfCombOptions):
    """Trunks with fans whose noisy step merges several steps.

    A step has a fan for each length that ends before the last step.
    """

    title: ClassVar[str] = "E-GRPO"
    kind: Literal["e_grpo"] = option("e_grpo", "Trunks with fans of merged steps.", E_GRPO)

    def make(self, steps: int, leaves: int, at: Any = None) -> TreePlan:
        check_steps("splits", at, steps)
        fans = [
            Fan(step=k, width=self.branch, length=length, coupling=self.coupling)
            for k in at
            for length in E_GRPO_LENGTHS
            if k + length <= steps - 1
        ]
        return _comb(steps, leaves, fans)


class CustomTreeOptions(TreeOptions):
    """Your own plan function."""

    title: ClassVar[str] = "GRPO"
    kind: Literal["custom"] = option("custom", "Your own plan function.")
    function: Text = option(
        ...,
        "What makes it, as module:attribute: called with iteration, steps, leaves, seed and args, "
        "it returns a TreePlan.",
    )
    args: dict[str, Any] = option({}, "Further arguments of the function, by name.")

    def plan(self, *, iteration: int, steps: int, leaves: int, seed: int) -> TreePlan:
        """Call the function. Raises PlanError when there is none, or its plan is another size."""
        name = self.function
        try:
            make = load_callable(name)
        except LookupError as error:
            raise PlanError(f"cannot load the plan {name}: {error.args[0]}") from error
        named = {"iteration": iteration, "steps": steps, "leaves": leaves, "seed": seed} | self.args
        try:
            plan = make(**named)
        except Exception as error:  # whatever people's own code raises, it is one sentence to them
            reason = f"{type(error).__name__}: {error}"
            raise PlanError(
                f"the plan {name} failed in iteration {iteration} with args {self.args}: {reason}"
            ) from error
        if not isinstance(plan, TreePlan):
            raise PlanError(f"{name} returned {plan!r}, expected a flowrl.trees.plan.TreePlan")
        made = len(plan.steps), count(plan).leaves
        if made != (steps, leaves):
            raise PlanError(
                f"the plan of {name} has {made[0]} steps and {made[1]} leaves, expected {steps} "
                f"steps and a group_size of {leaves}: the nearest that works is {made[1]}"
            )
        return plan


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


# --- parts of plans ------------------------------------------------------------------------------


def chains(
    steps: int,
    leaves: int,
    noisy: Iterable[int],
    trained: Iterable[int] | None = None,
    same_noise: bool = False,
) -> TreePlan:
    """Return independent chains with noise in these steps; trained: all of them by default."""
    check_leaves(leaves)
    made = _forest(steps, noisy, noisy if trained is None else trained, {})
    return TreePlan(roots=leaves, steps=made, same_noise=same_noise)


def _forest(
    steps: int,
    noisy: Iterable[int],
    trained: Iterable[int],
    branch: dict[int, int],
    coupling: NoiseCoupling = INDEPENDENT,
) -> tuple[Step, ...]:
    noisy, trained = set(noisy), set(trained)
    return tuple(
        Step(
            branch=branch.get(i, 1),
            noise=i in noisy,
            coupling=coupling if i in branch else INDEPENDENT,
            train=i in trained,
        )
        for i in range(steps)
    )


def _comb(steps: int, leaves: int, fans: list[Fan]) -> TreePlan:
    width, ends = fans[0].width, sum(len(fan.strides) for fan in fans)
    moves = sum(-(-(steps - f.step - f.length) // s) for f in fans for s in f.strides)
    if moves > MAX_MOVES:
        raise PlanError(
            f"fans at {len({f.step for f in fans})} of {steps} steps make {moves:,} moves, "
            f"expected at most {MAX_MOVES:,}: name fewer steps in rollout.tree.splits"
        )
    roots = check_leaves(leaves, width * ends, f"{width} x {ends}" if ends > 1 else str(width))
    return TreePlan(roots=roots, steps=(Step(),) * steps, fans=tuple(fans))


def _roots_of_power(leaves: int, branch: int, power: int) -> int:
    return check_leaves(leaves, branch**power, f"{branch}^{power}" if power > 1 else str(branch))


def check_leaves(leaves: int, unit: int = 1, made_of: str = "1") -> int:
    """Return how many trees of `unit` leaves make `leaves`; made_of: its factors, as in 2^4."""
    if leaves < 1:
        raise PlanError(f"group_size is {leaves}: the nearest that works is {unit}")
    if leaves % unit == 0:
        return leaves // unit
    above = (leaves // unit + 1) * unit
    near = [str(n) for n in (above - unit, above) if n > 0]
    made = str(unit) if made_of == str(unit) else f"{made_of} = {unit}"
    raise PlanError(
        f"group_size is {leaves}, but trees of {made} leaves give {unit}, {2 * unit}, ...: the "
        f"nearest that work are {' and '.join(near)}",
        leaves=above,
    )


def check_steps(name: str, chosen: Sequence[int], steps: int) -> Sequence[int]:
    """Return the steps if distinct, within 0..T-2 and at least one; name: of the option."""
    if not chosen:
        raise PlanError(f"{name} is empty, expected at least one step: the nearest that works is 0")
    for n, step in enumerate(chosen):
        if step in chosen[:n]:
            raise PlanError(f"{name} has step {step} more than once")
        if not 0 <= step <= steps - 2:
            raise PlanError(
                f"{name} has step {step}, but noise is possible in steps 0 to {steps - 2}, never "
                "in the last"
            )
    return chosen

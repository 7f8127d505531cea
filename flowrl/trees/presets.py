"""Make the plan of a published method: one function each. `leaves` is images per prompt, exact.

All raise PlanError when `leaves` (the option group_size) cannot be reached, or when a step that
should have noise lies outside 0..steps - 2: the last step never has noise.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.trees.plan import INDEPENDENT, Fan, NoiseCoupling, PlanError, Step, TreePlan, count
from flowrl.utils.imports import load_callable

MAX_MOVES = 20_000  # of one tree
BRANCH_COUPLING = NoiseCoupling(kind="shared", strength=4.0)  # BranchGRPO's Eq. 2 with its s
G2RPO_STRIDES = (1, 2, 3)  # every child is finished once in moves of so many steps
E_GRPO_LENGTHS = (1, 2)  # steps that a fan's noisy step merges, a fan for each


def ode(steps: int, leaves: int) -> TreePlan:
    """Independent chains without noise, for what learns from clean images or their path."""
    return _chains(steps, leaves, noisy=())


def flow_grpo(steps: int, leaves: int) -> TreePlan:
    """Independent chains, noise in every step but the last (Flow-GRPO, 2505.05470)."""
    return _chains(steps, leaves, noisy=range(steps - 1))


def flow_grpo_fast(steps: int, leaves: int, window: range) -> TreePlan:
    """Independent chains, stochastic and trained in the window, ODE elsewhere (Flow-GRPO-Fast)."""
    return _chains(steps, leaves, noisy=check_window(window, steps))


def dance_grpo(steps: int, leaves: int, trained: Iterable[int]) -> TreePlan:
    """Chains from one noise, all stochastic; only `trained` steps are learned from (2505.07818)."""
    chosen = check_steps("trained", sorted(trained), steps)
    noisy = range(steps - 1)
    return _chains(steps, leaves, noisy=noisy, trained=chosen, same_noise=True)


def mix_grpo(steps: int, leaves: int, window: range) -> TreePlan:
    """Chains from one noise, stochastic and trained in the window only (MixGRPO, 2507.21802).

    Up to the window all images of a prompt are equal: this part is sampled once, as the trunk of
    one tree.
    """
    noisy = check_window(window, steps)
    check_leaves(leaves)
    return TreePlan(roots=1, steps=_forest(steps, noisy, noisy, {noisy[0]: leaves}))


def branch_grpo(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int],
    coupling: NoiseCoupling = BRANCH_COUPLING,
) -> TreePlan:
    """All steps but the last stochastic, `branch` children at each split (BranchGRPO, 2509.06040).

    Steps before the first split of a single tree are not trained: one node a depth has nothing to
    be compared with.
    """
    return _branching(steps, leaves, branch, splits, range(steps - 1), coupling)


def branch_grpo_mix(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int],
    window: range,
    coupling: NoiseCoupling = BRANCH_COUPLING,
) -> TreePlan:
    """BranchGRPO with noise and training at the splits and in the window only, ODE elsewhere."""
    noisy = {*splits, *check_window(window, steps)}
    return _branching(steps, leaves, branch, splits, noisy, coupling)


def tree_grpo(
    steps: int, leaves: int, branch: int, window: range, coupling: NoiseCoupling = INDEPENDENT
) -> TreePlan:
    """`branch` children at each step of the window, ODE elsewhere (TreeGRPO, 2512.08153).

    With w steps of the window from step i, a tree takes i + sum_{j<w} k^j + k^w (T - i - w)
    forwards. Siblings are independent in the paper; simplex coupling keeps the same law of each
    image and loses none of the gradient to the group's mean.
    """
    inside = check_window(window, steps)
    roots = _roots_of_power(leaves, branch, len(inside))
    parts = dict.fromkeys(inside, branch)
    return TreePlan(roots=roots, steps=_forest(steps, inside, inside, parts, coupling))


def b2_diffurl(steps: int, leaves: int, branch: int, last: int) -> TreePlan:
    """A stochastic trunk, `branch` continuations of the last steps (B2-DiffuRL, 2503.11240).

    The continuations are trained, as far as they have noise. A tree takes
    (T - m) + K m - (K - 1) forwards, m = last: the published (T - m) + K m counts the velocity at
    the branching once for every child.
    """
    if not 2 <= last <= steps:
        near = min(max(last, 2), steps)
        raise PlanError(
            f"the last {last} of {steps} steps cannot be continuations: they begin before the "
            f"last step, which has no noise; the nearest number that works is {near}"
        )
    split = steps - last
    roots = _roots_of_power(leaves, branch, 1)
    noisy, trained = range(steps - 1), range(split, steps - 1)
    return TreePlan(roots=roots, steps=_forest(steps, noisy, trained, {split: branch}))


def b2_stage(iteration: int, stages: int, first: int, last: int) -> int:
    """Return how many last steps B2-DiffuRL trains at an iteration.

    m(j) = m_lo + floor(j (m_hi - m_lo + 1) / J) for j < J = stages, then m_hi.
    """
    if iteration >= stages:
        return last
    return first + iteration * (last - first + 1) // stages


def check_leaves(leaves: int, unit: int = 1, made_of: str = "1") -> int:
    """Return how many trees of `unit` leaves make `leaves`; made_of: its factors, as in 2^4."""
    if leaves < 1:
        raise PlanError(f"group_size is {leaves}: the nearest that works is {unit}")
    if leaves % unit == 0:
        return leaves // unit
    below = leaves // unit * unit
    near = [n for n in (below, below + unit) if n > 0]
    near = [n for n in near if abs(n - leaves) == min(abs(m - leaves) for m in near)]
    made = str(unit) if made_of == str(unit) else f"{made_of} = {unit}"
    which = "nearest that works is" if len(near) == 1 else "nearest that work are"
    raise PlanError(
        f"group_size is {leaves}, but trees of {made} leaves give {unit}, {2 * unit}, ...: "
        f"the {which} {' and '.join(map(str, near))}",
        leaves=near[-1],
    )


def check_window(window: range, steps: int) -> range:
    """Return the window if it is not empty and within the steps that may have noise."""
    if not window or window.step != 1:
        raise PlanError(f"the window is {window}, expected at least one step and none left out")
    if window[0] < 0 or window[-1] > steps - 2:
        raise PlanError(
            f"the window covers steps {window[0]} to {window[-1]}, but noise is possible in steps "
            f"0 to {steps - 2}, never in the last"
        )
    return window


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


def _roots_of_power(leaves: int, branch: int, power: int) -> int:
    if branch < 2:
        raise PlanError(f"branch is {branch}, expected at least 2: the nearest that works is 2")
    if power * math.log2(branch) > 60:
        raise PlanError(
            f"trees of {branch}^{power} leaves are asked for, more than any group_size: branch at "
            "fewer steps, or into fewer"
        )
    return check_leaves(leaves, branch**power, f"{branch}^{power}" if power > 1 else str(branch))


def _branching(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int],
    noisy: Iterable[int],
    coupling: NoiseCoupling,
) -> TreePlan:
    check_steps("splits", splits, steps)
    roots = _roots_of_power(leaves, branch, len(splits))
    # Before the first split of a single tree an edge has no other to be compared with.
    trained = {i for i in noisy if roots > 1 or i >= min(splits)}
    parts = dict.fromkeys(splits, branch)
    return TreePlan(roots=roots, steps=_forest(steps, noisy, trained, parts, coupling))


def _chains(
    steps: int,
    leaves: int,
    noisy: Iterable[int],
    trained: Iterable[int] | None = None,
    same_noise: bool = False,
) -> TreePlan:
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
    if steps < 2:
        raise PlanError(f"a plan needs at least 2 steps, got {steps}: the last has no noise")
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


# --- Published combs as plans: trunks without noise, and fans of one noisy step each -----------


def tempflow(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int] | None = None,
    coupling: NoiseCoupling = INDEPENDENT,
) -> TreePlan:
    """A fan at every step of independent trunks (TempFlow-GRPO, 2508.04324).

    `splits` None is every step but the last. N trunks with fans of K then take
    N (T - 1) + N K T (T - 1) / 2 forwards: a trunk ends where its last fan begins, which shares
    its velocity; the published N T counts a fan in the last step.
    """
    splits = check_steps("splits", range(steps - 1) if splits is None else splits, steps)
    return _comb(steps, leaves, [Fan(step=k, width=branch, coupling=coupling) for k in splits])


def g2rpo(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int],
    coupling: NoiseCoupling = INDEPENDENT,
) -> TreePlan:
    """Fans whose children are each finished once for every stride (G2RPO, 2510.01982).

    The published cost of fans of G at steps k < M is
    M + G sum_k sum_lambda ceil((T - k - 1) / lambda), which counts a child's first velocity once
    for every stride; here the strides share it, which saves (number of strides - 1) G M.
    """
    check_steps("splits", splits, steps)
    fans = [Fan(step=k, width=branch, strides=G2RPO_STRIDES, coupling=coupling) for k in splits]
    return _comb(steps, leaves, fans)


def e_grpo(
    steps: int,
    leaves: int,
    branch: int,
    splits: Sequence[int],
    coupling: NoiseCoupling = INDEPENDENT,
) -> TreePlan:
    """Fans whose noisy step merges several steps into one (E-GRPO, 2601.00423).

    A step of `splits` has a fan for each length that ends before the last step.
    """
    check_steps("splits", splits, steps)
    lengths = E_GRPO_LENGTHS
    fans = [
        Fan(step=k, width=branch, length=length, coupling=coupling)
        for k in splits
        for length in lengths
        if k + length <= steps - 1
    ]
    if not fans:
        raise PlanError(
            f"no fan fits: merging {min(lengths)} steps from step {min(splits)} would reach the "
            f"last of {steps} steps, which has no noise; the nearest length that works is "
            f"{steps - 1 - min(splits)}"
        )
    return _comb(steps, leaves, fans)


def _comb(steps: int, leaves: int, fans: list[Fan]) -> TreePlan:
    width, ends = fans[0].width, sum(len(fan.strides) for fan in fans)
    if width < 1:
        raise PlanError(f"branch is {width}: the nearest that works is 1")
    moves = sum(-(-(steps - f.step - f.length) // s) for f in fans for s in f.strides)
    if moves > MAX_MOVES:
        raise PlanError(
            f"fans at {len({f.step for f in fans})} of {steps} steps make {moves:,} moves, "
            f"expected at most {MAX_MOVES:,}: name fewer steps in rollout.tree.splits"
        )
    roots = check_leaves(leaves, width * ends, f"{width} x {ends}" if ends > 1 else str(width))
    return TreePlan(roots=roots, steps=(Step(),) * steps, fans=tuple(fans))


def custom(
    steps: int,
    leaves: int,
    function: str,
    args: Mapping[str, Any],
    *,
    iteration: int,
    seed: int,
) -> TreePlan:
    """Call `module:attribute` with (iteration, steps, leaves, seed, **args).

    Raises PlanError when there is none, or it returns no plan of so many steps and leaves.
    """
    try:
        make = load_callable(function)
    except LookupError as error:
        raise PlanError(f"cannot load the plan {function}: {error.args[0]}") from error
    named = {"iteration": iteration, "steps": steps, "leaves": leaves, "seed": seed} | dict(args)
    try:
        inspect.signature(make).bind(**named)
    except TypeError as error:
        raise PlanError(
            f"the plan {function} cannot be made with args {dict(args)}: {error}"
        ) from error
    try:
        plan = make(**named)
    except Exception as error:  # whatever people's own code raises, it is one sentence to them
        raise PlanError(
            f"the plan {function} failed in iteration {iteration}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{function} returned {plan!r}, expected a flowrl.trees.plan.TreePlan")
    if len(plan.steps) != steps:
        raise PlanError(f"the plan of {function} has {len(plan.steps)} steps, expected {steps}")
    made = count(plan).leaves
    if made != leaves:
        raise PlanError(
            f"the plan of {function} has {made} leaves, but group_size is {leaves}: the nearest "
            f"that works is {made}"
        )
    return plan

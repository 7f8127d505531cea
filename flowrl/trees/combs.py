"""Published combs as plans: trunks without noise, and fans of one noisy step each.

`leaves` is pictures per prompt, exact. A fan has `width` children a trunk; each is finished
without noise. All raise PlanError as the forests of `flowrl.trees.presets` do.
"""

from collections.abc import Sequence

from flowrl.trees.plan import INDEPENDENT, Coupling, Fan, PlanError, Step, TreePlan
from flowrl.trees.presets import check_leaves, check_steps


def tempflow(
    steps: int,
    leaves: int,
    width: int,
    at: Sequence[int] | None = None,
    coupling: Coupling = INDEPENDENT,
) -> TreePlan:
    """A fan at every step of independent trunks (TempFlow-GRPO, 2508.04324).

    `at` None is every step but the last. N trunks with fans of K then take
    N (T - 1) + N K T (T - 1) / 2 forwards: a trunk ends where its last fan begins, which shares
    its velocity; the published N T counts a fan in the last step.
    """
    at = check_steps("at", range(steps - 1) if at is None else at, steps)
    return _comb(steps, leaves, [Fan(step=k, width=width, coupling=coupling) for k in at])


def g2rpo(
    steps: int,
    leaves: int,
    width: int,
    at: Sequence[int],
    strides: Sequence[int] = (1, 2, 3),
    coupling: Coupling = INDEPENDENT,
) -> TreePlan:
    """Fans whose children are each finished once for every stride (G2RPO, 2510.01982).

    The published cost of fans of G at steps k < M is
    M + G sum_k sum_lambda ceil((T - k - 1) / lambda), which counts a child's first velocity once
    for every stride; here the strides share it, which saves (number of strides - 1) G M.
    """
    at = check_steps("at", at, steps)
    if len(set(strides)) < len(strides) or min(strides, default=0) < 1:
        raise PlanError(f"strides are {list(strides)}, expected distinct numbers of at least 1")
    fans = [Fan(step=k, width=width, strides=tuple(strides), coupling=coupling) for k in at]
    return _comb(steps, leaves, fans)


def e_grpo(
    steps: int,
    leaves: int,
    width: int,
    at: Sequence[int],
    lengths: Sequence[int] = (1, 2),
    coupling: Coupling = INDEPENDENT,
) -> TreePlan:
    """Fans whose noisy step merges several steps into one (E-GRPO, 2601.00423).

    A step of `at` has a fan for each length that ends
    before the last step.
    """
    at = check_steps("at", at, steps)
    if len(set(lengths)) < len(lengths) or min(lengths, default=0) < 1:
        raise PlanError(f"lengths are {list(lengths)}, expected distinct numbers of at least 1")
    fans = [
        Fan(step=k, width=width, length=length, coupling=coupling)
        for k in at
        for length in lengths
        if k + length <= steps - 1
    ]
    if not fans:
        raise PlanError(
            f"no fan fits: merging {min(lengths)} steps from step {min(at)} would reach the last "
            f"of {steps} steps, which has no noise; the nearest length that works is "
            f"{steps - 1 - min(at)}"
        )
    return _comb(steps, leaves, fans)


def first_half(steps: int) -> range:
    """The steps that G2RPO and E-GRPO perturb; those with the larger noise."""
    return range(steps // 2)


def check_alike(steps: int, at: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise PlanError if steps of `at` have room for different lengths: draws would vary."""
    fits = {sum(k + length <= steps - 1 for length in lengths) for k in at}
    if len(fits) > 1:
        raise PlanError(
            f"at has step {max(at)}, from where merging {max(lengths)} steps would reach the last "
            f"of {steps}, and group_size would differ from draw to draw: the nearest that works is "
            f"{max(steps - 1 - max(lengths), 0)}, or leave that step out"
        )


def _comb(steps: int, leaves: int, fans: list[Fan]) -> TreePlan:
    width, ends = fans[0].width, sum(len(fan.strides) for fan in fans)
    if width < 1:
        raise PlanError(f"width is {width}: the nearest that works is 1")
    roots = check_leaves(leaves, width * ends, f"{width} x {ends}" if ends > 1 else str(width))
    return TreePlan(roots=roots, steps=(Step(),) * steps, fans=tuple(fans))

"""Plans of people's own: a callable under its import path, and a check of what it returns."""

import inspect
from collections.abc import Mapping
from typing import Any

from flowrl.trees.plan import PlanError, TreePlan
from flowrl.trees.shape import count
from flowrl.utils.imports import load_callable


def custom_plan(
    target: str,
    args: Mapping[str, Any],
    *,
    iteration: int,
    steps: int,
    leaves: int,
    seed: int,
) -> TreePlan:
    """Call `module:attribute` with (iteration, steps, leaves, seed, **args).

    Modules are looked for where Python does, and last in the working directory. Raises PlanError
    when there is none, or when what it returns is no plan of so many steps and leaves.
    """
    try:
        make = load_callable(target)
    except LookupError as error:
        raise PlanError(f"cannot load the plan {target}: {error.args[0]}") from error
    named = {"iteration": iteration, "steps": steps, "leaves": leaves, "seed": seed} | dict(args)
    try:
        inspect.signature(make).bind(**named)
    except TypeError as error:
        raise PlanError(
            f"the plan {target} cannot be made with args {dict(args)}: {error}"
        ) from error
    try:
        plan = make(**named)
    except Exception as error:  # whatever people's own code raises, it is one sentence to them
        raise PlanError(
            f"the plan {target} failed in iteration {iteration}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{target} returned {plan!r}, expected a flowrl.trees.plan.TreePlan")
    if len(plan.steps) != steps:
        raise PlanError(f"the plan of {target} has {len(plan.steps)} steps, expected {steps}")
    made = count(plan).leaves
    if made != leaves:
        raise PlanError(
            f"the plan of {target} has {made} leaves, but group_size is {leaves}: the nearest that "
            f"works is {made}"
        )
    return plan

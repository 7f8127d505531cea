"""The options of windows: which steps are stochastic or trained, as training goes on."""

from typing import Annotated, Literal

from pydantic import Field

from flowrl.trees import windows
from flowrl.trees.plan import PlanError
from flowrl.utils.fields import Count, Number, Section, Whole, option

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
MIX_GRPO = "MixGRPO, arXiv 2507.21802"
TREE_GRPO = "TreeGRPO, arXiv 2512.08153"
BRANCH_GRPO = "BranchGRPO, arXiv 2509.06040"
SIZE = "How many steps the window covers."


class AllSteps(Section):
    """Every step but the last."""

    kind: Literal["all"] = option("all", "Every step but the last.", FLOW_GRPO)


class FixedWindow(Section):
    """The same steps in every rollout."""

    kind: Literal["fixed"] = option(
        "fixed", "The window never moves.", "MixGRPO-Flash*, 2507.21802"
    )
    size: Count = option(..., SIZE)
    start: Whole = option(0, "First step of the window, counted from 0 at pure noise.")


class RandomWindow(Section):
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


class ProgressiveWindow(Section):
    """A stretch that moves from pure noise towards the picture."""

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


class GeometricWindow(Section):
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
    AllSteps | FixedWindow | RandomWindow | ProgressiveWindow | GeometricWindow,
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
    if isinstance(window, AllSteps):
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

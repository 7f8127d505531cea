"""How slowly a lagging copy follows the policy: copy <- decay copy + (1 - decay) policy.

A schedule is a function of the iteration, from 0; decay 0 copies, 1 freezes.
"""

from collections.abc import Callable

Schedule = Callable[[int], float]


def ramp(*, rate: float, limit: float, start: int = 0) -> Schedule:
    """0 until iteration `start`, then rising by `rate` an iteration up to `limit`.

    Raises ValueError for a negative rate, or a limit outside [0, 1].
    """
    _share("limit", limit)
    if rate < 0:
        raise ValueError(f"rate is {rate}; it must not be negative")
    return lambda iteration: min(max(iteration - start, 0) * rate, limit)


def stepped(*, limit: float, start: int = 0) -> Schedule:
    """0 before iteration `start`, `limit` from then on. Raises ValueError outside [0, 1]."""
    _share("limit", limit)
    return lambda iteration: limit if iteration >= start else 0.0


def renewed(every: int) -> Schedule:
    """A fresh copy in every `every`-th iteration, unchanged in between: online DPO's reference.

    Raises ValueError for every < 1.
    """
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")
    return lambda iteration: 0.0 if iteration % every == 0 else 1.0


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")

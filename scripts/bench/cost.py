"""The cost model of two-stage rollouts (Sol-RL, 2604.06916)."""

import math


def two_stage_ratio(
    *,
    candidates: int,
    keep: int,
    preview_steps: int,
    steps: int,
    gain: float = 1.0,
    fixed: float = 0.0,
) -> float:
    """Return the seconds of two stages over those of N full images (Sol-RL, 2604.06916).

    ((s_p / S) / q + phi) / (1 + phi) + K / N. Work once an iteration, such as loading new weights
    into the low-bit copy, is left out. The ratio is always above K / N.

    Args:
        gain: q, seconds of an exact step over those of a low-precision one.
        fixed: phi, seconds to decode and score an image over those of its S exact steps.

    Raises:
        ValueError: not 1 <= K <= N, s_p >= 1, S >= 1, q > 0 and phi >= 0.
    """
    if not 1 <= keep <= candidates:
        raise ValueError(f"keep is {keep} of {candidates} candidates: from 1 to all of them")
    if preview_steps < 1 or steps < 1:
        raise ValueError(f"steps are {preview_steps} and {steps}: at least 1 each")
    if not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"gain is {gain}, expected a positive number")
    if not (math.isfinite(fixed) and fixed >= 0):
        raise ValueError(f"fixed is {fixed}, expected 0 or more")
    explore = (preview_steps / steps / gain + fixed) / (1 + fixed)
    return explore + keep / candidates


def break_even_gain(
    *, candidates: int, keep: int, preview_steps: int, steps: int, fixed: float = 0.0
) -> float:
    """Return the gain q at which `two_stage_ratio` is 1; inf if there is none.

    Raises ValueError as it does.
    """
    args = {"candidates": candidates, "keep": keep, "preview_steps": preview_steps, "steps": steps}
    two_stage_ratio(**args, fixed=fixed)
    room = (1 - keep / candidates) * (1 + fixed) - fixed
    return preview_steps / steps / room if room > 0 else math.inf

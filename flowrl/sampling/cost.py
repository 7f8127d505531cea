"""What exploring cheaply and regenerating a few should cost, before anything is run.

A picture takes S steps and a fixed part, decoding and scoring. Exploring draws N candidates in s_p
steps, each q times as fast, and pays the fixed part for all; then K are drawn in full.
"""

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
    """Seconds of two stages by those of drawing all N in full: Sol-RL's (2604.06916) arithmetic.

    ((s_p / S) / q + phi) / (1 + phi) + K / N

    gain: q, seconds of an exact step by those of a low-precision one; below 1 where it is slower.
    fixed: phi, seconds to decode and score a picture by those of its S exact steps.
    What takes time once an iteration, such as putting new weights in, is left out. Below 1 is
    cheaper than N full pictures; it can never be as cheap as drawing only K, which is K / N.
    Raises ValueError for what is not 1 <= K <= N, s_p >= 1, S >= 1, q > 0 and phi >= 0.
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
    """The q from which two stages are no dearer than drawing all N in full; inf if none is.

    The q at which `two_stage_ratio` is 1. Raises ValueError as it does.
    """
    args = {"candidates": candidates, "keep": keep, "preview_steps": preview_steps, "steps": steps}
    two_stage_ratio(**args, fixed=fixed)
    room = (1 - keep / candidates) * (1 + fixed) - fixed
    return preview_steps / steps / room if room > 0 else math.inf

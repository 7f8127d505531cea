"""Gradient signal of each trained step: how large its gradient is, and how much of it repeats.

The gradient of a step, over independent rollouts of one policy, is a part that repeats and noise.
With gradients g_1 ... g_M of M rollouts,

    power   = mean_m |g_m|^2
    repeats = mean_{m != m'} <g_m, g_m'> / power

`repeats` is the share of the power that is the expected gradient: 0 is noise alone, 1 none. A step
that holds most of the power and does not repeat drowns the others: gradients add up over steps.
All of it follows from the inner products of steps, so that it is known, too, for any choice of
them: what the gradient without a step would be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.trajectory import Rollout, Transitions

MOST = 0.5  # share of the power that is most of it
NOISE = 0.02  # a share that repeats below this is taken for none

# (some of a batch's edges, perhaps none): accumulate their share of the batch's gradient
Backward = Callable[[Transitions], None]


def trained_steps(rollout: Rollout) -> tuple[int, ...]:
    """Return the denoising steps that a rollout trains, the same on every process."""
    tree = rollout.tree
    return tuple(tree.step[tree.parent[tree.edge]].unique().tolist())


def step_gradients(
    batch: Transitions,
    steps: Sequence[int],
    backward: Backward,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """Return the part of the loss's gradient that comes from each step, on the CPU. (S, D)

    Their sum is the gradient of the whole batch. The parameters' own gradients are None before
    each call of `backward`, and afterwards.
    """
    found = []
    for step in steps:
        for p in parameters:
            p.grad = None
        backward(batch.take(batch.parent[batch.step == step].unique()))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found.append(torch.cat([grad.detach().flatten() for grad in grads]).cpu())
    for p in parameters:
        p.grad = None
    return torch.stack(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignal:
    """One step's gradient, over independent rollouts."""

    step: int
    sigma: float
    rms: float  # root mean square of its norm
    share: float  # of the power of all steps
    repeats: float  # share of its power that repeats
    rest: float  # the same of the gradient of all other steps; NaN where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The signal of every trained step, and of their sum."""

    steps: tuple[StepSignal, ...]
    rms: float
    repeats: float
    drowning: tuple[int, ...]  # steps with most of the power that repeat less than the others
    kept: float  # share that would repeat without those; NaN where there are none


class SignalMeter:
    """Collects the gradients of independent rollouts, one (S, D) each; keeps no more than a sum."""

    def __init__(self, steps: Sequence[int], sigmas: Sequence[float]):
        self.steps, self.sigmas = tuple(steps), tuple(sigmas)
        self._total: Tensor | None = None  # (S, D)
        self._within = torch.zeros(len(steps), len(steps), dtype=torch.float64)
        self._count = 0

    @classmethod
    def of(cls, rollout: Rollout) -> "SignalMeter":
        """Return a meter of the steps that a rollout trains."""
        steps = trained_steps(rollout)
        return cls(steps, [rollout.tree.sigmas[step].item() for step in steps])

    def add(self, gradients: Tensor) -> None:
        self._within += _inner(gradients)
        self._total = gradients.clone() if self._total is None else self._total + gradients
        self._count += 1

    def signal(self, *, parts: int = 1) -> Signal:
        """Return what the rollouts say; at least two are needed.

        parts: of how many such rollouts a gradient will be the mean. The part that repeats stays,
        and the noise falls.
        """
        if self._total is None or self._count < 2:
            raise ValueError(f"a signal needs at least two rollouts, got {self._count}")
        within, count = self._within / self._count, self._count
        repeated = (_inner(self._total) / count - within) / (count - 1)
        power = repeated + (within - repeated) / parts
        each = power.diagonal()
        found = []
        for i, (step, sigma) in enumerate(zip(self.steps, self.sigmas, strict=True)):
            found.append(
                StepSignal(
                    step=step,
                    sigma=sigma,
                    rms=each[i].clamp(min=0).sqrt().item(),
                    share=_ratio(each[i], each.sum()),
                    repeats=_ratio(repeated[i, i], each[i]),
                    rest=_repeats(repeated, power, {i}),
                )
            )
        drowning = _drowning(repeated, power)
        return Signal(
            steps=tuple(found),
            rms=power.sum().clamp(min=0).sqrt().item(),
            repeats=_repeats(repeated, power, set()),
            drowning=tuple(self.steps[i] for i in sorted(drowning)),
            kept=_repeats(repeated, power, drowning) if drowning else float("nan"),
        )


def _inner(gradients: Tensor) -> Tensor:
    """Return the inner products of rows (S, D), summed in float64. (S, S)"""
    rows = [gradients[i].double() for i in range(len(gradients))]
    return torch.stack([torch.stack([a @ b for b in rows]) for a in rows])


def _ratio(part: Tensor, whole: Tensor) -> float:
    return (part / whole).item() if whole > 0 else float("nan")


def _repeats(repeated: Tensor, power: Tensor, without: set[int]) -> float:
    """Return the share that repeats of the sum of all steps but some; NaN of none."""
    keep = [i for i in range(len(power)) if i not in without]
    return _ratio(repeated[keep][:, keep].sum(), power[keep][:, keep].sum())


def _drowning(repeated: Tensor, power: Tensor) -> set[int]:
    """Return steps to leave out, one after the other: the strongest of those that are left, while
    it holds most of their power and repeats less than half as much as the others without it."""
    gone: set[int] = set()
    each = power.diagonal()
    while len(gone) < len(power) - 1:
        left = [i for i in range(len(power)) if i not in gone]
        top = max(left, key=lambda i: each[i].item())
        rest = _repeats(repeated, power, gone | {top})
        own = _ratio(repeated[top, top], each[top])
        # Few rollouts know the rest no better: the first step may go by its own noise alone.
        limit = rest / 2 if gone else max(rest / 2, NOISE)
        if not (each[top] > MOST * each[left].sum() and own < limit and (rest > NOISE or not gone)):
            break
        gone.add(top)
    return gone


# --- what to change ------------------------------------------------------------------------------


def advice(signal: Signal, tree: Any, num_steps: int) -> str:
    """Return a sentence on what to change in the recipe. tree: the options of `rollout.tree`."""
    if not signal.drowning:
        text = "No step holds most of the gradient's power without repeating."
        if signal.repeats < NOISE:
            text += (
                f" Of the whole only {max(signal.repeats, 0):.1%} repeats from rollout to rollout: "
                "a larger batch (rollout.prompts_per_iteration, rollout.group_size) or fewer "
                "trained steps (a window) would leave less noise."
            )
        return text
    lost = {s.step: s for s in signal.steps if s.step in signal.drowning}
    names = ", ".join(f"{s.step} (sigma {s.sigma:.2f})" for s in lost.values())
    many = len(lost) > 1
    share, kept = sum(s.share for s in lost.values()), max(signal.kept, 0)
    return (
        f"Step{'s' * many} {names} hold{'s' * (not many)} {share:.0%} of the gradient's power and "
        f"{'do' if many else 'does'} not repeat; without, {kept:.1%} of the gradient "
        f"repeats, with {max(signal.repeats, 0):.1%}. To leave {'them' if many else 'it'} out, "
        + _ways(signal, tree, num_steps)
    )


def _ways(signal: Signal, tree: Any, num_steps: int) -> str:
    kept = [s.step for s in signal.steps if s.step not in signal.drowning]
    first, size = _longest_run(kept)
    window = f"{{kind: fixed, start: {first}, size: {size}}}"
    ways = []
    if (splits := getattr(tree, "splits", None)) is not None:
        fewer = [step for step in splits if step not in signal.drowning]
        if fewer and fewer != splits:
            ways.append(f"set rollout.tree.splits to {fewer}")
    if getattr(tree, "window", None) is not None:
        ways.append(f"set rollout.tree.window to {window}")
    else:
        ways.append(
            "take a tree with a window, such as rollout.tree={kind: flow_grpo_fast, window: "
            f"{window}}}"
        )
    ways.append("weight steps by their noise (objective.step_weight: noise)")
    if len(signal.steps) > 1 and max(signal.drowning) >= num_steps // 2:
        ways.append("branch and train earlier, where sigma is large")
    return "; or ".join(ways) + "."


def _longest_run(steps: Sequence[int]) -> tuple[int, int]:
    """Return the first step and the length of the longest run of consecutive steps."""
    best, start = (steps[0], 1), steps[0]
    for before, step in zip((steps[0], *steps), steps, strict=False):
        start = start if step - before <= 1 else step
        best = max(best, (start, step - start + 1), key=lambda run: run[1])
    return best


def check_signal(states: str) -> None:
    """Raises UserError unless the objective learns from denoising steps."""
    if states != "transitions":
        raise UserError(
            "the gradient signal is that of stochastic denoising steps, and this recipe's "
            "objective learns from images or from the reward's gradient: take one such as grpo or "
            "spo, with a rollout.tree that has noise"
        )


def signal_rows(signal: Signal) -> list[dict[str, Any]]:
    """Return a row of a table for each step, and one for the whole gradient."""
    rows: list[dict[str, Any]] = [
        {"step": s.step, "sigma": s.sigma, "rms norm": s.rms, "share of power": s.share}
        | {"repeats": s.repeats, "repeats without": s.rest}
        for s in signal.steps
    ]
    return [*rows, {"step": "all", "rms norm": signal.rms, "repeats": signal.repeats}]


def signal_metrics(signal: Signal) -> dict[str, float]:
    """Return the metrics of a signal, by their names in metrics.jsonl."""
    found = {"signal/rms": signal.rms, "signal/repeats": signal.repeats}
    for s in signal.steps:
        own = {"rms": s.rms, "share": s.share, "repeats": s.repeats}
        found |= {f"signal/{name}/step_{s.step}": value for name, value in own.items()}
    return found

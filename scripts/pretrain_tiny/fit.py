"""The loop that both stages of the pretraining share: warm-up, plateau, decay, resume."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from flowrl.errors import UserError
from flowrl.utils.files import load_state, save_state

SAVE_SECONDS = 120
WARM_UP = 200  # steps
EMA = 0.999

Track = Callable[[Iterable[int], str], Iterable[int]]  # wraps the steps in a progress bar


def generator_at(seed: int, step: int) -> torch.Generator:
    """Return the randomness of one step of a stage."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def plain_track(steps: Iterable[int], name: str) -> Iterable[int]:
    return steps


def fit(
    name: str,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_at: Callable[[int], Tensor],
    *,
    steps: int,
    decay: float,
    folder: Path,
    ema: nn.Module | None = None,
    begin_at: str | None = None,
    track: Track = plain_track,
) -> None:
    """Minimise `loss_at(step)`; saves and resumes in `folder`.

    begin_at: the name of a finished stage with the same parts, from whose end this one begins,
    without a warm-up.

    The optimisers' own learning rates are the peaks; in the last share `decay` of the steps they
    fall to zero. The loss must draw its randomness from the step number alone: then a run that was
    stopped and one that was not see the same batches. Before `decay_start` neither the rate nor
    the loss may depend on `steps`: until then a run may be resumed with another number of them.
    Raises UserError when one is resumed so too late.
    """
    path = folder / f"{name}.safetensors"
    parts: dict[str, Any] = {
        "module": module,
        **{f"optimizer_{i}": o for i, o in enumerate(optimizers)},
    }
    if ema is not None:
        parts["ema"] = ema
    if begin_at is not None:
        _load(load_state(folder / f"{begin_at}.safetensors"), parts)
        for optimizer in optimizers:  # the schedule below begins anew
            for group in optimizer.param_groups:
                group["lr"] = group.pop("initial_lr")
    start = _restore(path, parts, steps, decay)
    warm_up = 0 if begin_at else WARM_UP
    schedules = [
        LambdaLR(o, lambda step: trapezoid(step, steps, decay, warm_up), start - 1)
        for o in optimizers
    ]
    saved, heard = time.monotonic(), RunningLoss(name, steps)
    for step in track(range(start, steps), name):
        loss = loss_at(step)
        module.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if ema is not None:
            _average(ema, module, min(EMA, (step + 1) / (step + 10)))
        heard.hear(step, loss)
        if time.monotonic() - saved > SAVE_SECONDS or step + 1 == steps:
            save_state(
                path,
                {key: part.state_dict() for key, part in parts.items()}
                | {"step": step + 1, "steps": steps},
            )
            saved = time.monotonic()


def _restore(path: Path, parts: dict[str, Any], steps: int, decay: float) -> int:
    if not path.exists():
        return 0
    state = load_state(path)
    if state["steps"] != steps and state["step"] > decay_start(min(state["steps"], steps), decay):
        raise UserError(
            f"{path} holds step {state['step']} of {state['steps']}: too late to train {steps} "
            f"instead. Ask for {state['steps']} steps, or delete the file to start over"
        )
    _load(state, parts)
    return state["step"]


def _load(state: dict[str, Any], parts: dict[str, Any]) -> None:
    for key, part in parts.items():
        part.load_state_dict(state[key])


def decay_start(steps: int, decay: float) -> int:
    """The first step whose learning rate lies below the peak, when the last share `decay` falls."""
    return math.floor(steps * (1 - decay)) + 1


def trapezoid(step: int, steps: int, decay: float, warm_up: int = WARM_UP) -> float:
    """Factor of the learning rate: linear up, constant, linear down to zero at `steps`.

    decay: the share of the steps in which it falls; with 0 it never does.
    """
    up = (step + 1) / warm_up if warm_up else 1.0
    return min(1.0, up, (1 - step / steps) / decay if decay else 1.0)


class RunningLoss:
    """Prints a smoothed loss now and then."""

    def __init__(self, name: str, steps: int):
        self.name, self.steps = name, steps
        self.average: float | None = None
        self.printed = time.monotonic()

    def hear(self, step: int, loss: Tensor) -> None:
        value = loss.item()
        self.average = (
            value if self.average is None else self.average + 0.02 * (value - self.average)
        )
        if time.monotonic() - self.printed > 20:
            print(f"{self.name}: step {step + 1}/{self.steps}, loss {self.average:.4f}", flush=True)
            self.printed = time.monotonic()


@torch.no_grad()
def _average(ema: nn.Module, module: nn.Module, decay: float) -> None:
    for mean, now in zip(ema.parameters(), module.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)

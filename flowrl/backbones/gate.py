"""A gate in a pipeline's scheduler and texts, so that its own call computes one velocity.

While a gate is open, `set_timesteps` and `step` of the scheduler, and `encode_prompt` and
`prepare_latents` of the pipeline are replaced by functions of the same signatures. The objects stay
what they are: pipelines look at the class of their scheduler. Afterwards everything is as it was.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

# What a scheduler notes of the schedule that it is in.
STATE = ("timesteps", "sigmas", "num_inference_steps", "_step_index", "_begin_index")


class Stop(Exception):
    """Ends a call of the pipeline.

    Args:
        value: What the call was made for.
    """

    def __init__(self, value: Any = None):
        self.value = value


class RowTimes(Tensor):
    """One time a row. Guidance doubles the batch and expands a scalar: these repeat instead."""

    def expand(self, *sizes: Any) -> Tensor:
        size = sizes[0] if isinstance(sizes[0], int) else sizes[0][0]
        plain = self.as_subclass(Tensor)
        return plain if size == len(plain) else plain.repeat(size // len(plain))


@dataclass(slots=True)
class Visit:
    """One call of the pipeline through the gate: what it is given, and what it shows.

    Without `times` the scheduler works as it is.
    """

    texts: Any = None  # the record that replaces the encoder's results; None encodes
    latents: Tensor | None = None  # replace the pipeline's own
    prepared: dict[int, Any] = field(default_factory=dict)  # results of prepare_latents, by rows
    times: tuple[Tensor, Tensor] | None = None  # timesteps (n, ...) and sigmas for the scheduler
    until: str = ""  # where the call ends: "texts", "schedule", "step", or "" for its own end
    # Seen:
    encoded: list[Any] = field(default_factory=list)  # results of the encoder's calls
    shape: torch.Size | None = None  # of the pipeline's own latents
    sigmas: Tensor | None = None
    timesteps: Tensor | None = None
    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # sample, velocity


def call_through(pipeline: Any, visit: Visit, device: torch.device, call: dict[str, Any]) -> Any:
    """Call the pipeline, with gradients where they are enabled.

    Returns:
        What the call returned, or the value it was stopped with.
    """
    function = getattr(type(pipeline).__call__, "__wrapped__", type(pipeline).__call__)
    with _opened(pipeline, visit, device):
        try:
            return function(pipeline, **call)
        except Stop as stop:
            return stop.value


@contextmanager
def _opened(pipeline: Any, visit: Visit, device: torch.device) -> Iterator[None]:
    scheduler = pipeline.scheduler
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (scheduler, "set_timesteps", _set_timesteps(scheduler, visit, device)),
        (scheduler, "step", _step(scheduler, visit)),
        (pipeline, "progress_bar", functools.partial(tqdm, disable=True)),  # a bar a velocity
        (pipeline, "encode_prompt", _encode(pipeline.encode_prompt, visit, device)),
    ]
    if hasattr(pipeline, "prepare_latents"):
        patches.append((pipeline, "prepare_latents", _prepare_latents(pipeline, visit)))
    before = {name: vars(scheduler)[name] for name in STATE if name in vars(scheduler)}
    kind = type(pipeline)
    inherited = vars(kind).get("_execution_device")
    kind._execution_device = property(lambda _: device)
    for owner, name, replacement in patches:
        vars(owner)[name] = replacement
    try:
        yield
    finally:
        for owner, name, _ in patches:
            del vars(owner)[name]
        vars(scheduler).update(before)
        if inherited is None:
            del kind._execution_device
        else:
            kind._execution_device = inherited


def _set_timesteps(scheduler: Any, visit: Visit, device: torch.device) -> Callable[..., None]:
    plain = scheduler.set_timesteps

    @functools.wraps(plain)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        if visit.times is None:
            plain(*args, **kwargs)
            visit.timesteps = scheduler.timesteps
            visit.sigmas = getattr(scheduler, "sigmas", None)
            _stop_if_complete(visit)
            return
        scheduler.timesteps, scheduler.sigmas = visit.times
        scheduler.num_inference_steps = len(scheduler.timesteps)
        scheduler._step_index = scheduler._begin_index = None

    return set_timesteps


def _step(scheduler: Any, visit: Visit) -> Callable[..., Any]:
    plain = scheduler.step

    @functools.wraps(plain)
    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if visit.shape is None:
            visit.shape = sample.shape
        if visit.until == "step":
            raise Stop(model_output)
        visit.steps.append((sample.detach(), model_output.detach()))
        return plain(model_output, timestep, sample, *args, **kwargs)

    return step


def _prepare_latents(pipeline: Any, visit: Visit) -> Callable[..., Any]:
    plain = pipeline.prepare_latents

    @functools.wraps(plain)
    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        x = visit.latents
        if x is None or len(x) not in visit.prepared:
            made = plain(*args, **kwargs)
            first = made[0] if isinstance(made, tuple) else made
            visit.shape = first.shape
            _stop_if_complete(visit)
            if x is None:
                return made
            visit.prepared[len(x)] = made[1:] if isinstance(made, tuple) else None
        extras = visit.prepared[len(x)]
        return x if extras is None else (x, *extras)

    return prepare_latents


def _stop_if_complete(visit: Visit) -> None:
    """End the call where it has shown what it was made for."""
    if visit.until == "texts" and visit.encoded:
        raise Stop
    if visit.until == "schedule" and visit.timesteps is not None:
        raise Stop


def _encode(plain: Callable[..., Any], visit: Visit, device: torch.device) -> Callable[..., Any]:
    replay = iter(visit.texts or ())

    @functools.wraps(plain)
    def encode(*args: Any, **kwargs: Any) -> Any:
        if visit.texts is not None:
            return next(replay)
        signature = inspect.signature(plain)
        call = signature.bind(*args, **kwargs)
        if "device" in signature.parameters:
            call.arguments["device"] = device
        result = plain(*call.args, **call.kwargs)
        visit.encoded.append(result)
        return result

    return encode

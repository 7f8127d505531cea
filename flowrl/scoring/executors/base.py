"""Interface of executors, which take images and answer later, and the one in this process."""

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.config.rewards import InlineOptions
from flowrl.errors import UserError
from flowrl.scoring.executors.user_code import contained_settings, describe_error

Reward = Callable[[Tensor, list[str], list[dict]], Any]  # see the docstring of `flowrl_rewards`
LOG = logging.getLogger(__name__)


class RewardFailure(UserError):
    """Too many scores are missing, or a reward cannot work as it is set up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reward's scores of B images."""

    scores: Tensor  # (B,) float32 on the CPU, NaN where there is none
    reasons: Mapping[int, str] = field(default_factory=dict)  # by row, for each without a score
    seconds: float = 0.0  # from asking to the answer


class Executor(Protocol):
    """Calls one reward. `submit` may return before the answer is there.

    A failure is an Answer of NaN with reasons. The future raises RewardFailure only for what would
    fail for every image (a missing package, an answer of the wrong length).
    """

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        """Score images (B, 3, H, W) float32 in [0, 1], multiples of 1/255, on the CPU."""
        ...

    def close(self) -> None:
        """End its threads and processes; a second call does nothing."""
        ...


# --- answers --------------------------------------------------------------------------------------


def failed(count: int, reason: str, seconds: float = 0.0) -> Answer:
    """Return an answer without scores for `count` images, all for one reason."""
    return Answer(
        scores=torch.full((count,), math.nan),
        reasons=dict.fromkeys(range(count), reason),
        seconds=seconds,
    )


def joined(parts: Sequence[Answer], seconds: float) -> Answer:
    """Join the answers to consecutive images."""
    reasons: dict[int, str] = {}
    start = 0
    for part in parts:
        reasons |= {start + row: text for row, text in part.reasons.items()}
        start += len(part.scores)
    scores = torch.cat([part.scores for part in parts]) if parts else torch.empty(0)
    return Answer(scores=scores, reasons=reasons, seconds=seconds)


def to_levels(images: Tensor) -> Tensor:
    """Return images (B, ...) in [0, 1], finite, as uint8 levels on the CPU."""
    return (images.detach().float() * 255).round_().clamp_(0, 255).byte().cpu()


def read_answer(answer: Any, count: int) -> Answer:
    """Return what a reward returned for `count` images, as an Answer.

    A reward returns scores (a tensor, an array or a list of floats, None for a missing one), alone
    or in a pair with a mapping from row to reason. A row with a reason has no score, since servers
    have written 0 for failures; nor has infinity. Raises ValueError for another length or form.
    """
    reasons: Mapping[int, str] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping | None):
        answer, reasons = answer[0], answer[1] or {}
    if isinstance(answer, list | tuple):
        answer = [math.nan if value is None else value for value in answer]
    try:
        scores = torch.as_tensor(answer, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"answered with {type(answer).__name__}, expected numbers") from error
    if scores.shape != (count,):
        raise ValueError(
            f"answered with shape {tuple(scores.shape)} for {count} images; expected ({count},)"
        )
    missing = (~scores.isfinite()).nonzero().flatten().tolist()
    why = dict.fromkeys(missing, "the reward gave no finite number")
    why |= {row: str(reasons[row]) for row in range(count) if row in reasons}
    scores = scores.index_fill(0, torch.tensor(sorted(why), dtype=torch.long), math.nan)
    return Answer(scores=scores, reasons=why)


# --- calls in this process ------------------------------------------------------------------------


def ask(
    reward: Reward, name: str, images: Tensor, prompts: list[str], metadata: list[dict]
) -> Answer:
    """Call a reward in this process; an exception becomes the reason of its missing scores.

    Its traceback is logged for --debug. Settings of the process that it changes are restored.

    Raises:
        RewardFailure: for a missing package and an answer of the wrong form.
        torch.cuda.OutOfMemoryError: as the reward does.
    """
    began = time.perf_counter()
    try:
        with torch.no_grad(), contained_settings(name):
            # Copies, since a reward may change them in place.
            raw = reward(images.clone(), list(prompts), [dict(m) for m in metadata])
    except ImportError as error:
        raise RewardFailure(f"reward {name!r} cannot run: {error}") from error
    except (RewardFailure, torch.cuda.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        if getattr(error, "ends_run", False):
            raise RewardFailure(f"reward {name!r} ends the run: {error}") from None
        LOG.debug("reward %r failed", name, exc_info=True)
        return failed(len(images), describe_error(error), time.perf_counter() - began)
    try:
        answer = read_answer(raw, len(images))
    except ValueError as error:
        raise RewardFailure(f"reward {name!r} {error}") from error
    return replace(answer, seconds=time.perf_counter() - began)


class _Later(Future):
    """Work that is done when its result is taken: until then the network that generates images has
    the device for itself."""

    def __init__(self, work: Callable[[], Answer]):
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Answer:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
            del self._work  # which holds the images
        return super().result(timeout)


class DaemonThread:
    """A thread that does work in order. Unlike that of ThreadPoolExecutor it is a daemon, so that
    the interpreter does not wait for a reward that hangs.

    gpu: that is current in it; it is a thread's own, and 0 in a new thread.
    """

    def __init__(self, name: str, gpu: int | None = None):
        self._gpu = gpu
        self._work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        if self._closed:
            raise RuntimeError("this executor is closed")
        future: Future[Any] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """End without what has not begun; a reward that hangs is left behind after a second."""
        self._closed = True
        while not self._work.empty():
            if (item := self._work.get()) is not None:
                item[0].cancel()
        self._work.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            del item, future, work  # which hold images


class InlineExecutor:
    """Calls a reward in this process, when the answer is taken; it has no deadline.

    Where the device's memory does not suffice, the micro-batch is halved for good, unless the
    reward compares whole groups.

    Args:
        gpu: number of the GPU that is current in its thread; None leaves it to torch.
    """

    def __init__(
        self,
        reward: Reward,
        name: str,
        options: InlineOptions | None = None,
        gpu: int | None = None,
    ):
        options = options or InlineOptions()
        self.reward, self.name, self.options = reward, name, options
        self._micro_batch = options.micro_batch
        self._thread = DaemonThread(f"reward {name}", gpu) if options.background else None

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        work = functools.partial(self._ask, images, prompts, metadata)
        return self._thread.submit(work) if self._thread is not None else _Later(work)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def _ask(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Answer:
        began = time.perf_counter()
        parts: list[Answer] = []
        start = 0
        while start < len(images):
            rows = slice(start, start + (self._micro_batch or len(images)))
            size = len(images[rows])
            try:
                part = ask(self.reward, self.name, images[rows], prompts[rows], metadata[rows])
            except torch.cuda.OutOfMemoryError as error:
                if size > 1 and getattr(self.reward, "scope", "sample") != "group":
                    self._micro_batch = size // 2
                    continue
                part = failed(size, f"the device's memory does not suffice for {size}: {error}")
            parts.append(part)
            start += size
        return joined(parts, time.perf_counter() - began)

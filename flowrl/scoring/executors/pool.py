"""Asking a reward in processes of their own: one that hangs or crashes harms no other."""

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pebble import ProcessExpired, ProcessPool
from torch import Tensor

from flowrl.scoring.executors.base import Answer, RewardFailure, failed, joined, to_levels

if TYPE_CHECKING:
    import numpy as np

    from flowrl.scoring.executors.base import InlineExecutor


# --- What runs in a pool's process: one reward, made at the first question, on one thread ------

# Scores (B,) as a float32 array with reasons by row, or one text: why none can ever be made.
Reply = tuple[Any, dict[int, str]] | str

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LOOK = 1.0  # seconds between looks at whether the parent lives, where no signal of its end arrives

_swap = threading.Lock()
_setup: tuple[str, dict[str, Any], str] | None = None
_asked: "InlineExecutor | None" = None


class _Process(SpawnProcess):
    def start(self) -> None:
        with _without_main():
            super().start()


class Context(SpawnContext):
    """Spawned processes that leave the script alone that was started: running it a second time
    would train a second time where it has no `if __name__ == "__main__":`."""

    Process = _Process  # pyright: ignore[reportAssignmentType]


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    with _swap:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def prepare(target: str, args: Mapping[str, Any], name: str) -> None:
    """First thing in a new process. It cannot fail: the reward is made by `score`, which can say
    why it could not."""
    global _setup
    os.environ.update(ONE_THREAD)
    _setup = target, dict(args), name
    threading.Thread(target=_end_with_parent, daemon=True).start()


def score(levels: "np.ndarray", prompts: list[str], metadata: list[dict]) -> Reply:
    """Ask the reward about images (B, 3, H, W) of 0 to 255.

    Only plain data goes back: an exception of someone else's might not survive the way.
    """
    import torch

    from flowrl.scoring.executors.base import RewardFailure, failed

    global _asked
    assert _setup is not None
    target, args, name = _setup
    if _asked is None:
        torch.set_num_threads(1)
        try:
            _asked = _made(target, args, name)
        except Exception as error:
            return f"reward {name!r} cannot be made in a process of its own: {error}"
    images = torch.from_numpy(levels).float() / 255  # exactly what `scoring.quantise` made
    try:
        answer = _asked.submit(images, prompts, metadata).result()
    except RewardFailure as error:
        return str(error)
    except BaseException as error:  # a reward that calls sys.exit, for one
        answer = failed(len(prompts), f"{type(error).__name__}: {error}")
    return answer.scores.numpy(), dict(answer.reasons)


def _made(target: str, args: Mapping[str, Any], name: str) -> "InlineExecutor":
    from flowrl.scoring.executors.base import InlineExecutor
    from flowrl.scoring.spec import load_reward

    return InlineExecutor(load_reward(target, args), name)


def _end_with_parent() -> None:
    """No process outlives the one that started it, whatever ended that and whatever runs here."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(LOOK)
    os._exit(1)


# --- One process with one reward in it, as the pool's thread that owns it sees it --------------

SLACK = 5.0  # seconds


class Died(Exception):
    """The process ended with the question unanswered; the message says how."""


class TookTooLong(Exception):
    """The process was stopped because its time was up; the message says how long it took."""


class Closed(Exception):
    """`stop` was called."""


class Process:
    """Answers one question at a time; started by the first, and anew after it died, was stopped or
    has answered `max_tasks` questions.

    timeout: seconds for one question, counted from when the process takes it up. start: seconds
    more for the first one of a process, which loads packages and weights; once one has answered,
    those after it get what it took twice over.
    """

    def __init__(
        self,
        target: str,
        args: Mapping[str, Any],
        name: str,
        *,
        timeout: float,
        start: float,
        max_tasks: int | None,
    ):
        self._setup = (target, dict(args), name)
        self.timeout, self.start, self.max_tasks = timeout, start, max_tasks
        self._pool: ProcessPool | None = None
        self._question: Future[Reply] | None = None
        self._answered = 0  # by this process
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, levels: np.ndarray, prompts: list[str], metadata: list[dict]) -> Reply:
        """As `worker.score`. Raises Died, TookTooLong or Closed, and RewardFailure for arguments
        that cannot be sent."""
        began = time.monotonic()
        try:
            question, limit = self._send(levels, prompts, metadata)
            # Twice as long and more: a process that does not even come up must not be waited for.
            reply = question.result(2 * limit + self.start)
        except CancelledError as error:
            raise Closed from error
        except (ProcessExpired, RuntimeError) as error:
            self.retire()
            raise Died(_how(error)) from error
        except TimeoutError as error:
            limit = f"{self.timeout:g} s" if self._answered else f"{self._first:g} s with loading"
            self.retire()
            raise TookTooLong(
                f"took longer than {limit} and was stopped; give it a longer timeout, or fewer "
                "images at a time"
            ) from error
        except Closed:
            raise
        except Exception as error:
            self.retire()
            raise RewardFailure(
                f"reward {self._setup[-1]!r} cannot be asked in a process of its own: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self._answered:
            self.start = min(self.start, SLACK + 2 * (time.monotonic() - began))
        self._answered += 1
        if self._answered == self.max_tasks:
            self.retire()
        return reply

    def stop(self) -> None:
        """From any thread: `ask` raises Closed, now and for ever. The process is left to
        `retire`."""
        with self._lock:
            self._closed = True
            if self._question is not None:
                self._question.cancel()

    def retire(self) -> None:
        """End the process, if there is one, whatever it does."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
        self._pool, self._answered = None, 0

    @property
    def _first(self) -> float:
        return self.timeout + self.start

    def _send(self, *question: Any) -> "tuple[Future[Reply], float]":
        """-> the reply to come, and the seconds that it may take."""
        with self._lock:
            if self._closed:
                raise Closed
            if self._pool is not None and not self._pool.active:
                self.retire()  # it died while it had nothing to do
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=1, initializer=prepare, initargs=self._setup, context=Context()
                )
            limit = self.timeout if self._answered else self._first
            self._question = self._pool.schedule(score, args=question, timeout=limit)
            return self._question, limit


def _how(error: Exception) -> str:
    """For people: what the process died of."""
    if not isinstance(error, ProcessExpired):
        return f"its process ended before it took up the images ({error})"
    code = error.exitcode or 0
    if -code in set(signal.Signals):
        return (
            f"its process was ended by {signal.Signals(-code).name}; look at what it printed, and "
            "whether memory ran out"
        )
    return f"its process ended with exit code {code}; look at what it printed"


# --- Asking a reward in processes of their own: one that hangs or crashes harms no other -------

START = 120.0  # seconds
CLOSED = "its pool of processes was closed before it could answer"
IN_A_ROW = 3  # micro-batches without an answer, after which the pool rests
REST = 60.0  # seconds
CLOSING = 15.0  # seconds to wait for processes to end; one that ignores SIGTERM takes 3


@dataclass(slots=True, kw_only=True)
class _Submission:
    """What was asked together; its parts are answered in any order, by any process."""

    future: "Future[Answer]"
    answers: list[Answer | None]
    began: float
    lock: threading.Lock

    def put(self, index: int, answer: Answer | RewardFailure) -> None:
        with self.lock:
            if self.future.done():
                return
            if isinstance(answer, RewardFailure):
                self.future.set_exception(answer)
                return
            self.answers[index] = answer
            answers = [part for part in self.answers if part is not None]
            if len(answers) == len(self.answers):
                self.future.set_result(joined(answers, time.perf_counter() - self.began))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    submission: _Submission
    index: int
    levels: np.ndarray  # (b, 3, H, W) uint8
    prompts: list[str]
    metadata: list[dict]


class PoolExecutor:
    """A reward by its import path, made once in each of `workers` spawned processes of one thread.

    A micro-batch that takes longer than `timeout` seconds is stopped by killing its process, and is
    not tried again. One whose process dies is tried once more: the machine may be to blame. Either
    way its images alone have no score, and a new process takes the next. After three in a row
    without an answer nothing is asked for a minute, so that a broken reward costs minutes, not
    hours. The first micro-batch of each process has `start` seconds more, to load the reward; once
    one has loaded it, those after it have twice what that took.

    micro_batch: most images of one question; None never splits a submission, as rewards that
    compare the images of a prompt need it. max_tasks: questions after which a process is
    replaced, against engines that leak. Processes start with the first submission, ignore Ctrl-C
    and end with this one. What is submitted is kept as bytes until it is answered, at most a
    rollout; the queue has no other bound.
    """

    def __init__(
        self,
        target: str,
        args: Mapping[str, Any] | None,
        name: str,
        *,
        workers: int = 1,
        timeout: float = 60.0,
        micro_batch: int | None = 8,
        max_tasks: int | None = None,
        start: float = START,
    ):
        limits = {"workers": workers, "timeout": timeout, "micro_batch": micro_batch}
        for option, value in (limits | {"max_tasks": max_tasks}).items():
            if value is not None and value <= 0:
                raise ValueError(f"{option} of reward {name!r} is {value}, expected more than 0")
        self.name, self.micro_batch = name, micro_batch
        self._processes = [
            Process(target, args or {}, name, timeout=timeout, start=start, max_tasks=max_tasks)
            for _ in range(workers)
        ]
        self._threads: list[threading.Thread] = []
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._unanswered = 0  # micro-batches in a row
        self._rests_until = 0.0

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        if self._closed:
            raise RuntimeError(f"the pool of reward {self.name!r} is closed")
        levels = to_levels(images).numpy()
        size = self.micro_batch or max(1, len(levels))
        starts = range(0, len(levels), size)
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: what is drawn is scored
        submission = _Submission(
            future=future,
            answers=[None] * len(starts),
            began=time.perf_counter(),
            lock=threading.Lock(),
        )
        if not starts:
            future.set_result(failed(0, ""))
        self._begin()
        for index, start in enumerate(starts):
            rows = slice(start, start + size)
            self._parts.put(
                _Part(
                    submission=submission,
                    index=index,
                    levels=levels[rows],
                    prompts=prompts[rows],
                    metadata=metadata[rows],
                )
            )
        return future

    def close(self) -> None:
        """End the processes at once; what is not answered then has no score."""
        self._closed = True
        atexit.unregister(self.close)
        for process in self._processes:
            process.stop()
        for _ in self._threads:
            self._parts.put(None)
        until = time.monotonic() + CLOSING
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _begin(self) -> None:
        if self._threads:
            return
        atexit.register(self.close)
        # Daemons: an interpreter that ends does not wait for the queue, it closes the pool.
        self._threads = [
            threading.Thread(target=self._work, args=(p,), name=f"reward {self.name}", daemon=True)
            for p in self._processes
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, process: Process) -> None:
        try:
            while (part := self._parts.get()) is not None:
                if not part.submission.future.done():
                    part.submission.put(part.index, self._answer(process, part))
        finally:
            process.retire()

    def _answer(self, process: Process, part: _Part) -> Answer | RewardFailure:
        count = len(part.prompts)
        if self._closed:
            return failed(count, CLOSED)
        if self._resting():
            return failed(count, f"not asked, after {IN_A_ROW} micro-batches without an answer")
        began = time.perf_counter()
        try:
            reply = self._ask(process, part)
        except Closed:
            return failed(count, CLOSED)
        except (Died, TookTooLong) as error:
            self._note(answered=False)
            return failed(count, str(error), time.perf_counter() - began)
        except RewardFailure as error:
            return error
        except Exception as error:  # nobody would hear of it in this thread
            return RewardFailure(f"reward {self.name!r}: {type(error).__name__}: {error}")
        self._note(answered=True)
        if isinstance(reply, str):
            return RewardFailure(reply)
        scores, reasons = reply
        seconds = time.perf_counter() - began
        return Answer(scores=torch.from_numpy(scores), reasons=reasons, seconds=seconds)

    def _ask(self, process: Process, part: _Part) -> Reply:
        question = part.levels, part.prompts, part.metadata
        try:
            return process.ask(*question)
        except Died:
            return process.ask(*question)

    def _note(self, *, answered: bool) -> None:
        with self._lock:
            self._unanswered = 0 if answered else self._unanswered + 1
            if self._unanswered >= IN_A_ROW:
                self._rests_until = time.monotonic() + REST

    def _resting(self) -> bool:
        with self._lock:
            return time.monotonic() < self._rests_until

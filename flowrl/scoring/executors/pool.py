"""Call a reward in separate processes: one that hangs or crashes does not end the run.

Each thread takes a process that is idle. A micro-batch that takes too long is stopped by killing
its process; one whose process dies is tried once more, since the machine may be to blame. Only its
images have no score, and a new process takes the next micro-batch. After `IN_A_ROW` without an
answer the pool pauses for `REST` seconds, so that a broken reward costs minutes, not hours.
"""

import atexit
import logging
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pebble import ProcessExpired, ProcessPool
from torch import Tensor

from flowrl.config.rewards import PoolOptions
from flowrl.scoring.executors.base import (
    Answer,
    DaemonThreads,
    RewardFailure,
    failed,
    joined,
    to_levels,
)
from flowrl.scoring.executors.worker import VISIBLE, Context, Reply, prepare, score

START = 120.0  # seconds for a process to load its reward
SLACK = 5.0  # seconds
IN_A_ROW = 3  # micro-batches
REST = 60.0  # seconds
CLOSING = 15.0  # seconds to wait for processes to end; one that ignores SIGTERM takes 3
LOG = logging.getLogger(__name__)
CLOSED = "its pool of processes was closed before it could answer"


class PoolExecutor:
    """Calls a reward (its name or import path) in each of `options.workers` processes.

    Processes have one thread, start with the first submission, ignore Ctrl-C and end with this one.
    Images wait in the queue as uint8; its length has no limit.

    Args:
        options: with GPUs, the processes take them in turn and see one each, unless `args` name
            GPUs by number.
        start: seconds more for the first micro-batch of a process, which loads the reward; later
            processes have twice what the first took.
    """

    def __init__(
        self,
        target: str,
        args: Mapping[str, Any] | None,
        name: str,
        options: PoolOptions | None = None,
        *,
        start: float = START,
    ):
        self.name, self.options = name, options or PoolOptions()
        self.workers = self.options.workers
        gpus = () if _names_gpu(args) else self.options.gpus
        setup = (target, dict(args or {}), name)
        self._processes = [
            Process(setup, self.options, start=start, gpu=gpus[i % len(gpus)] if gpus else None)
            for i in range(self.workers)
        ]
        self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = DaemonThreads(f"reward {name}", self.workers)
        self._lock = threading.Lock()
        self._closed = False
        self._unanswered = 0  # micro-batches in a row
        self._rests_until = 0.0
        atexit.register(self.close)

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        if self._closed:
            raise RuntimeError(f"the pool of reward {self.name!r} is closed")
        levels = to_levels(images).numpy()
        size = self.options.micro_batch or max(1, len(levels))
        rows = [slice(start, start + size) for start in range(0, len(levels), size)]
        work = [partial(self._answer, levels[r], prompts[r], metadata[r]) for r in rows]
        return gathered([self._threads.submit(part) for part in work])

    def close(self) -> None:
        """End the processes at once; what is not answered then has no score."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for process in self._processes:
            process.stop()
            self._threads.submit(process.retire)
        self._threads.close(cancel=False, seconds=CLOSING)

    def _answer(self, levels: np.ndarray, prompts: list[str], metadata: list[dict]) -> Answer:
        """Score a micro-batch in a process that is idle. Raises RewardFailure."""
        if self._closed:
            return failed(len(prompts), CLOSED)
        if time.monotonic() < self._rests_until:
            reason = f"skipped, after {IN_A_ROW} micro-batches without an answer"
            return failed(len(prompts), reason)
        process, began = self._idle.get(), time.perf_counter()
        try:
            try:
                reply = process.score(levels, prompts, metadata)
            except Died:
                reply = process.score(levels, prompts, metadata)
        except CancelledError:
            return failed(len(prompts), CLOSED)
        except (Died, TookTooLong) as error:
            self._note(answered=False)
            return failed(len(prompts), str(error), time.perf_counter() - began)
        finally:
            self._idle.put(process)
        self._note(answered=True)
        if isinstance(reply, str):
            raise RewardFailure(reply)
        parts = {
            name: Answer(scores=torch.from_numpy(scores), reasons=reasons)
            for name, (scores, reasons) in reply.items()
        }
        seconds = time.perf_counter() - began
        return replace(parts.pop(""), seconds=seconds, components=parts)

    def _note(self, *, answered: bool) -> None:
        with self._lock:
            self._unanswered = 0 if answered else self._unanswered + 1
            if self._unanswered >= IN_A_ROW:
                self._rests_until = time.monotonic() + REST


def gathered(parts: "Sequence[Future[Answer]]") -> "Future[Answer]":
    """Return the future of the joined answers, which raises what the first failed part does."""
    whole: Future[Answer] = Future()
    whole.set_running_or_notify_cancel()  # it cannot be cancelled
    began, lock = time.perf_counter(), threading.Lock()

    def look(_: "Future[Answer] | None" = None) -> None:
        with lock:
            done = [part for part in parts if part.done()]
            error = next((error for part in done if (error := part.exception())), None)
            if whole.done():
                return
            if error is not None:
                whole.set_exception(error)
            elif len(done) == len(parts):
                answers = [part.result() for part in parts]
                whole.set_result(joined(answers, time.perf_counter() - began))

    for part in parts:
        part.add_done_callback(look)
    if not parts:
        look()
    return whole


# --- one process ----------------------------------------------------------------------------------


class Died(Exception):
    """The process ended before it answered; the message says how."""


class TookTooLong(Exception):
    """The process was stopped at its time limit."""


class Process:
    """A process that scores one micro-batch at a time, for one thread of the pool.

    The first micro-batch starts it; a new one is started after it died or was stopped. setup: the
    target, arguments and name of its reward. gpu: the only one that it sees, None for all.
    """

    def __init__(
        self, setup: tuple[str, dict[str, Any], str], options: PoolOptions, *, start: float,
        gpu: int | None = None,
    ):  # fmt: skip
        self._setup, self.options, self.start, self._gpu = setup, options, start, gpu
        self._pool: ProcessPool | None = None
        self._task: Future[Reply] | None = None
        self._answered = 0  # by this process
        self._closed = False
        self._lock = threading.Lock()

    def score(self, levels: np.ndarray, prompts: list[str], metadata: list[dict]) -> Reply:
        """Return what `worker.score` does.

        Raises Died, TookTooLong, CancelledError after `stop`, and RewardFailure for arguments that
        cannot be sent.
        """
        began, limit = time.monotonic(), 0.0
        try:
            task, limit = self._send(levels, prompts, metadata)
            # A limit here too, since pebble's begins only when the process has started.
            reply = task.result(2 * limit + self.start)
        except CancelledError:
            raise
        except (ProcessExpired, RuntimeError) as error:
            self.retire()
            raise Died(_describe(error)) from error
        except TimeoutError as error:
            loading = "" if self._answered else " with loading"
            self.retire()
            raise TookTooLong(
                f"took longer than {limit:g} s{loading} and was stopped; give it a longer timeout, "
                "or fewer images at a time"
            ) from error
        except Exception as error:
            self.retire()
            raise RewardFailure(
                f"reward {self._setup[-1]!r} cannot be called in another process: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self._answered:
            self.start = min(self.start, SLACK + 2 * (time.monotonic() - began))
        self._answered += 1
        return reply

    def stop(self) -> None:
        """Make `score` raise CancelledError from now on; thread-safe."""
        with self._lock:
            self._closed = True
            if self._task is not None:
                self._task.cancel()

    def retire(self) -> None:
        """Kill the process, if there is one."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
        self._pool, self._answered = None, 0

    def _send(self, *arguments: Any) -> "tuple[Future[Reply], float]":
        """Return the future reply and its time limit in seconds."""
        with self._lock:
            if self._closed:
                raise CancelledError
            if self._pool is not None and not self._pool.active:
                self.retire()  # it died while it had nothing to do
            if self._pool is None:
                visible = None if self._gpu is None else visible_name(self._gpu)
                debug = LOG.isEnabledFor(logging.DEBUG)
                self._pool = ProcessPool(
                    max_workers=1, initializer=prepare, initargs=(*self._setup, visible, debug),
                    context=Context(),
                )  # fmt: skip
            limit = self.options.timeout + (0.0 if self._answered else self.start)
            self._task = self._pool.schedule(score, args=arguments, timeout=limit)
            return self._task, limit


def visible_name(gpu: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls the GPU that is number `gpu` in this process."""
    here = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return here[gpu] if gpu < len(here) else str(gpu)


def _names_gpu(value: Any) -> bool:
    """Return whether arguments hold a device with a number, as in {device: cuda:1}."""
    if isinstance(value, Mapping):
        return any(_names_gpu(inner) for inner in value.values())
    return isinstance(value, str) and re.fullmatch(r"cuda:\d+", value) is not None


def _describe(error: Exception) -> str:
    """Say how the process died."""
    if not isinstance(error, ProcessExpired):
        return f"its process ended before it started ({error})"
    code = error.exitcode or 0
    if -code in set(signal.Signals):
        return (
            f"its process was ended by {signal.Signals(-code).name}; look at what it printed, and "
            "whether memory ran out"
        )
    return f"its process ended with exit code {code}; look at what it printed"

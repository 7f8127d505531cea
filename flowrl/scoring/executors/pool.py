"""Asking a reward in processes of their own: one that hangs or crashes harms no other."""

import atexit
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.scoring.executors.base import Answer, RewardFailure, failed, joined, to_levels
from flowrl.scoring.executors.process import Closed, Died, Process, TookTooLong
from flowrl.scoring.executors.worker import Reply

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


class Pool:
    """A reward by its import path, made once in each of `workers` spawned processes of one thread.

    A micro-batch that takes longer than `timeout` seconds is stopped by killing its process, and is
    not tried again. One whose process dies is tried once more: the machine may be to blame. Either
    way its pictures alone have no score, and a new process takes the next. After three in a row
    without an answer nothing is asked for a minute, so that a broken reward costs minutes, not
    hours. The first micro-batch of each process has `start` seconds more, to load the reward; once
    one has loaded it, those after it have twice what that took.

    micro_batch: most pictures of one question; None never splits a submission, as rewards that
    compare the pictures of a prompt need it. max_tasks: questions after which a process is
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

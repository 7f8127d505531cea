"""Asking a reward in this process, a micro-batch at a time."""

import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from flowrl.scoring.executors.base import Answer, Reward, ask, failed, joined


class _Later(Future):
    """Work that is done when its result is asked for: pictures are drawn first, and the network
    that draws them has the device and its number format for itself."""

    def __init__(self, work: Callable[[], Answer]):
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Answer:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
            del self._work  # which holds the pictures
        return super().result(timeout)


class _Background:
    """One thread that does work in order. A daemon: neither the end of a run nor that of the
    interpreter waits for a reward that hangs."""

    def __init__(self, name: str):
        self._work: queue.SimpleQueue[tuple[Future[Answer], Callable[[], Answer]] | None]
        self._work = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Answer]) -> "Future[Answer]":
        if self._closed:
            raise RuntimeError("this executor is closed")
        future: Future[Answer] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        self._closed = True
        while not self._work.empty():
            if (item := self._work.get()) is not None:
                item[0].cancel()
        self._work.put(None)
        self._thread.join(1.0)  # a courtesy; one that hangs is left behind

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


class Inline:
    """Calls the reward with at most `micro_batch` pictures at once, None for all, when the answer
    is asked for. Where the device's memory does not suffice, the micro-batch is halved for good;
    not of a reward that compares whole groups.

    background: at once and in a thread of its own, while further pictures are drawn; for rewards
    that wait for a network. There is no deadline but the reward's own.
    """

    def __init__(
        self, reward: Reward, name: str, *, micro_batch: int | None = None, background: bool = False
    ):
        self.reward, self.name, self.micro_batch = reward, name, micro_batch
        self._thread = _Background(f"reward {name}") if background else None

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
            rows = slice(start, start + (self.micro_batch or len(images)))
            size = len(images[rows])
            try:
                part = ask(self.reward, self.name, images[rows], prompts[rows], metadata[rows])
            except torch.cuda.OutOfMemoryError as error:
                if size > 1 and getattr(self.reward, "scope", "sample") != "group":
                    self.micro_batch = size // 2
                    continue
                part = failed(size, f"the device's memory does not suffice for {size}: {error}")
            parts.append(part)
            start += size
        return joined(parts, time.perf_counter() - began)

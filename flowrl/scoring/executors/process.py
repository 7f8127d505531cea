"""One process with one reward in it, as the pool's thread that owns it sees it."""

import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool

from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.executors.worker import Context, Reply, prepare, score

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
                "pictures at a time"
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
        return f"its process ended before it took up the pictures ({error})"
    code = error.exitcode or 0
    if -code in set(signal.Signals):
        return (
            f"its process was ended by {signal.Signals(-code).name}; look at what it printed, and "
            "whether memory ran out"
        )
    return f"its process ended with exit code {code}; look at what it printed"

"""SIGINT (Ctrl-C), SIGTERM and SIGHUP: end a program at once, or when a piece of work is done."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from flowrl.errors import Interrupted

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows lacks the last


class StopRequest:
    """The first signal that came."""

    def __init__(self) -> None:
        self.name = ""  # of the signal, "" before one
        self.number, self._at = 0, 0.0

    def set(self, number: int) -> None:
        self.number, self.name, self._at = number, signal.Signals(number).name, time.monotonic()

    def seconds(self) -> float:
        """Return the time since the signal, 0 before one."""
        return time.monotonic() - self._at if self.name else 0.0


def signal_source(number: int) -> str:
    """Return what sent a signal, in a user's words."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


_requests: list[StopRequest] = []  # of `when_done`, which are not nested in practice


def stop_request() -> StopRequest:
    """Return the request of the program's work, one without a signal outside of any."""
    return _requests[-1] if _requests else StopRequest()


@contextmanager
def at_once() -> Iterator[None]:
    """Raise Interrupted inside the block when a signal comes."""
    with _handled(_interrupt):
        yield


@contextmanager
def when_done(notify: Callable[[StopRequest], None]) -> Iterator[StopRequest]:
    """Yield a request that a signal fills; the block ends when it can. A second one interrupts.

    notify: called with the request in the signal's handler.
    """
    request = StopRequest()

    def handler(number: int, frame: FrameType | None) -> None:
        if request.name:
            _interrupt(number, frame)
        request.set(number)
        notify(request)

    _requests.append(request)
    try:
        with _handled(handler):
            yield request
    finally:
        _requests.remove(request)


@contextmanager
def passed_on(to: Callable[[int], None]) -> Iterator[None]:
    """Call `to` with the number of each signal that comes inside the block, and do nothing else."""
    with _handled(lambda number, frame: to(number)):
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number, signal_source(number))


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)] if main else []
    # nohup ignores hangups for a program that shall outlive its terminal.
    ignored = [n for n in numbers if n.name == "SIGHUP" and signal.getsignal(n) is signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, its in before.items():
            signal.signal(number, its)

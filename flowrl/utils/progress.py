"""Progress of a long job: a live bar on a terminal, an occasional plain line elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from flowrl.utils.templates import number

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 10.0  # seconds between printed lines where there is no terminal, or another bar is live


class SafeConsole(Console):
    """A console for plain text. A terminal breaks lines between words, a file gets them whole.

    A broken pipe is an error like any other, where rich ends the program.
    """

    def __init__(self, *, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False)
        self.soft_wrap = not self.is_terminal

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise  # noqa: PLE0704  # rich calls this while it handles the error


class Steps:
    """Shows the steps of a job while it is entered; `start` of them are done already.

    show: False for processes but the main one, which print nothing.
    """

    live: ClassVar[Console | None] = None  # of the bar on the terminal: one at most

    def __init__(
        self, what: str, total: int, *, start: int = 0, console: Console | None = None,
        show: bool = True,
    ):  # fmt: skip
        self.console, self._bar = console or SafeConsole(), None
        self._what, self._total, self._done, self._start = what, total, start, start
        self._began, self._printed = time.monotonic(), float("-inf")
        self._first = 0.0  # when the first step was done, which is slower than the others
        if not show:
            self.console = Console(quiet=True)
        elif Steps.live is not None:
            self.console = Steps.live
        elif self.console.is_terminal:
            self._bar = _bar(self.console)
        fields = {"total": total, "completed": start, "left": "", "notes": ""}
        self._task = self._bar and self._bar.add_task(what, **fields)

    def advance(self, values: Mapping[str, float | None] | None = None) -> None:
        """Count one step; show `values` (reward, loss, ...) beside it."""
        self._done += 1
        notes = " ".join(f"{name} {_note(value)}" for name, value in (values or {}).items())
        now = time.monotonic()
        self._first = self._first or now
        timed, rest = self._done - self._start - 1, self._total - self._done
        left = f"(left {clock((now - self._first) / timed * rest)})" if timed > 0 else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, left=left, notes=notes)
            return
        if now - self._printed >= EVERY or self._done == self._total:
            self._printed = now
            done = f"{self._what} {self._done}/{self._total} {clock(now - self._began)}"
            line = " ".join(part for part in (done, left, notes) if part)
            self.console.print(line, highlight=False, markup=False)

    def __enter__(self) -> "Steps":
        if self._bar is not None:
            Steps.live = self.console
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            Steps.live = None
            self._bar.stop()


def open_console(*, stderr: bool = False) -> Console:
    """Return where to print: above a live bar, or else a new console."""
    return Steps.live if Steps.live is not None else SafeConsole(stderr=stderr)


@contextmanager
def announced(what: str, *, show: bool = True) -> Iterator[None]:
    """Print that a job without steps runs, and how long it took if that was seconds.

    Args:
        show: Whether to print anything; processes but the main one do not.
    """
    console, began = open_console(stderr=True), time.monotonic()
    if show:
        console.print(f"{what} ...")
    yield
    spent = time.monotonic() - began
    if show and spent >= 2:
        console.print(f"{what} took {clock(spent)}")


def _note(value: float | None) -> str:
    return str(value) if isinstance(value, int) else number(value)


def clock(seconds: float) -> str:
    """Format a time: 125.4 -> '2:05', 7265 -> '2:01:05'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar(console: Console) -> "Progress":
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        # On a narrow terminal these are broken into lines, and nothing else is cut.
        TextColumn("{task.fields[notes]}", markup=False, table_column=Column(overflow="fold")),
        console=console,
    )

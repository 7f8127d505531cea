"""What ends a program: errors that users correct, failures of the machine, and signals.

Every failure becomes one sentence here. `phase` marks what the program is doing; an exception that
leaves it, and that the machine caused (memory, disk, a pipe), becomes a `MachineFailure`, which
says where it happened and what helps. Whoever saves something then adds a note to the exception,
and the command line prints both and ends with `exit_code`. All else is a mistake in the program.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

PAGE = "docs/troubleshooting.md"


class UserError(Exception):
    """What was got, what was expected and what to do. Printed without a traceback."""


class DamagedFile(UserError):
    """A file of a run or a data set is not what was written; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of a check of this machine, of rewards or of their scores."""

    topic: str
    state: Literal["ok", "warning", "missing", "problem"]  # a warning stops nothing
    detail: str
    remedy: str = ""  # what to do, "" where there is nothing to do


# --- what the program is doing -------------------------------------------------------------------

PhaseName = Literal[
    "load", "check", "encode", "rollout", "decode", "score", "learn", "save", "evaluate", "gallery"
]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A phase that has begun."""

    name: PhaseName
    what: str  # what it works on, such as a reward; "" for nothing in particular
    began: float = 0.0  # by time.monotonic

    def __str__(self) -> str:
        return f"{self.name} ({self.what})" if self.what else self.name


_marks: list[Mark] = []  # of the main thread, the innermost last


@contextmanager
def phase(name: PhaseName, what: str = "") -> Iterator[None]:
    """Mark what is done inside the block; raise a `MachineFailure` for what the machine fails at.

    Phases may be nested: the innermost one counts.
    """
    mark = Mark(name, what, time.monotonic())
    _marks.append(mark)
    try:
        yield
    except Exception as error:
        failure = as_failure(error)
        if failure is None or failure is error:
            raise
        raise failure from error
    finally:
        _marks.remove(mark)


def current_phase() -> Mark | None:
    """Return the innermost phase, None outside of all."""
    return _marks[-1] if _marks else None


def in_phase(name: PhaseName) -> bool:
    """Return whether a phase has begun and not ended, innermost or not."""
    return any(mark.name == name for mark in _marks)


# --- failures ------------------------------------------------------------------------------------

Cause = Literal["memory", "space", "file", "pipe", "peer"]
MEMORY: dict[PhaseName, str] = {
    "load": "set pipeline.dtype to bf16, or memory.base_bits",
    "check": "lower rewards[].executor.micro_batch, or move rewards to a server",
    "encode": "set memory.text_encoders to offload or free",
    "rollout": "lower rollout.batch_size, or rollout.prompts_per_iteration, whose latents are held",
    "decode": "lower pipeline.decode_batch",
    "score": "lower rewards[].executor.micro_batch, or move rewards to a server",
    "learn": "lower optim.micro_batch, or set memory.gradient_checkpointing",
    "save": "end other programs of this machine",
    "evaluate": "lower evaluation.batch_size",
    "gallery": "end other programs of this machine",
}
CAUSES: dict[Cause, tuple[str, str, str]] = {  # in words, section of PAGE, remedy
    "memory": (
        "out of memory", "Out of memory",
        "end other programs of this device, or take a smaller model",
    ),
    "space": (
        "no space left", "No space left",
        "free space there, lower run.keep_checkpoints, or move the run to another disk",
    ),
    "file": (
        "a file cannot be used", "No space left", "look at its permissions and at the disk",
    ),
    "pipe": (
        "the output is closed (broken pipe)", "The output is closed",
        "write into a file, or start it with nohup",
    ),
    "peer": (
        "a process is lost", "A process is lost",
        "look at that process and its machine, then start all again",
    ),
}  # fmt: skip
ERRNO: dict[int | None, Cause] = {
    errno.ENOMEM: "memory",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO), "file"),
    errno.EPIPE: "pipe",
}
# Names of torch's errors for more graphs than its limit, in its newer and its older versions.
RECOMPILED = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
CODES: dict[Cause, int] = {"pipe": 141, "peer": 75}  # as of SIGPIPE; "try again"; all others 1


class MachineFailure(UserError):
    """A failure of the machine."""

    def __init__(self, cause: Cause, detail: str, mark: Mark | None = None):
        self.cause: Cause = cause
        words, section, remedy = CAUSES[cause]
        where = f" in phase {mark}" if mark else ""
        if cause == "memory" and mark:
            remedy = MEMORY[mark.name]
        about = f'"{section}" in {PAGE}'
        super().__init__(f"{words}{where}: {detail}. What helps: {remedy}; see {about}")


class Interrupted(BaseException):
    """A signal that ends the program at once."""

    def __init__(self, number: int, name: str):
        self.number = number
        where = f" in phase {_marks[-1]}" if _marks else ""
        super().__init__(f"ended by {name}{where}")


def as_failure(error: BaseException) -> UserError | None:
    """Return the UserError of an exception, None for a mistake in the program and for signals."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(
            f"there can be no file {str(error.filename)[:60]!r}...: the name is too long"
        )
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return UserError("there can be no file whose name holds a NUL character: name another")
    if type(error).__name__ in RECOMPILED:
        return UserError(
            "the network was compiled for as many shapes of batches as torch allows: choose "
            "rollout.batch_size, optim.micro_batch and evaluation.batch_size such that all numbers "
            "of images are multiples of them, or set pipeline.compile to false"
        )
    cause = _cause_of(error)
    return None if cause is None else MachineFailure(cause, first_line(error), current_phase())


def exit_code(error: BaseException) -> int:
    """Return the code that a program ends with after an exception."""
    if isinstance(error, Interrupted):
        return 128 + error.number
    return CODES.get(error.cause, 1) if isinstance(error, MachineFailure) else 1


def _cause_of(error: BaseException) -> Cause | None:
    if isinstance(error, OSError):
        return ERRNO.get(error.errno)
    text = str(error).lower()
    # torch and safetensors have no classes of their own for most of these.
    words = ("out of memory", "allocate memory", "not enough memory", "cublas_status_alloc_failed")
    if isinstance(error, MemoryError) or any(part in text for part in words):
        return "memory"
    return "space" if "no space left on device" in text else None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

"""`UserError`, an error that the user can correct, and `CheckResult`, one line of a check."""

from dataclasses import dataclass
from typing import Literal


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

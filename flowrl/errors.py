"""The one exception that is meant for people: a sentence that names the thing and what to do."""

from dataclasses import dataclass
from typing import Literal


class UserError(Exception):
    """Something the user can mend. The command line prints it alone, without a traceback."""


# --- What check-ups find: of this machine, of rewards, of their scores -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of a check-up; `remedy` says what to do, "" where nothing is to be done.

    "warning" is what people should look at and that stops nothing.
    """

    topic: str
    state: Literal["ok", "warning", "missing", "problem"]
    detail: str
    remedy: str = ""

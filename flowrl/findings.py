"""What check-ups find: of this machine, of rewards, of their scores."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a check-up; `remedy` says what to do, "" where nothing is to be done.

    "warning" is what people should look at and that stops nothing.
    """

    topic: str
    state: Literal["ok", "warning", "missing", "problem"]
    detail: str
    remedy: str = ""

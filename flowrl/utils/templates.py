"""Fill in this package's templates: HTML is escaped by jinja2, Markdown by `markdown`."""

import functools
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_MARKDOWN = str.maketrans(
    {mark: "\\" + mark for mark in "\\`*_[]|~$:"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)

TITLES = {
    "geneval": "GenEval, share of the demands",
    "geneval_strict": "GenEval, all demands met",
    "tiny_judge": "shows its prompt, by another judge",
    "tiny_quality": "quality, 1 to 5",
    "tiny_proxy": "learned reward of the tiny world",
    "ocr": "text that can be read",
    "pickscore": "PickScore",
    "clipscore": "CLIPScore",
    "hpsv2": "HPSv2.1",
    "hpsv3": "HPSv3",
    "aesthetic": "LAION aesthetic score",
    "taste": "the voter's taste",
    "preference": "preferred in its pair",
}


def render(template: str, values: dict[str, Any]) -> str:
    """Return `flowrl/templates/<template>` filled in; a missing value is an error."""
    return _environment().get_template(template).render(values)


def finite_or_none(value: float | None) -> float | None:
    """Return the number, or None where it is missing, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else float(value)


def number(value: float | None) -> str:
    """Format a score: three decimals, fewer when large, "n/a" when missing."""
    value = finite_or_none(value)
    if value is None:
        return "n/a"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.5g}"


def signed(value: float | None) -> str:
    """Format a change like `number`, with a sign unless it is 0.000."""
    text = number(value)
    if finite_or_none(value) is None or not text.strip("-0."):
        return text.lstrip("-")
    return text if text.startswith("-") else "+" + text


def title_of(name: str) -> str:
    """Return what a measure is called in words; the name where it has none.

    name: of a reward, or `N_steps/NAME` of one at another number of steps.
    """
    steps, _, reward = name.rpartition("_steps/")
    title = TITLES.get(reward, reward)
    return f"{title}, {steps} steps" if steps else title


def markdown(text: str) -> str:
    """Escape `text` for a line of Markdown: none of it is markup, link, cell or HTML tag."""
    return " ".join(text.split()).translate(_MARKDOWN)


def fenced(text: str, language: str) -> str:
    """Return `text` as a block of code, with a fence longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("flowrl", "templates"),
        autoescape=select_autoescape(("html", "html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number=number, signed=signed, markdown=markdown, fenced=fenced, title_of=title_of
    )
    return environment

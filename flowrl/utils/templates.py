"""Text from the templates of this package: HTML escaped by jinja2, Markdown by `markdown`."""

import functools
import math
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

_MARKDOWN = str.maketrans(
    {mark: "\\" + mark for mark in "\\`*_[]|~$:"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def render(template: str, values: dict[str, Any]) -> str:
    """The template `flowrl/templates/<template>` filled in; a name it lacks is an error."""
    return _environment().get_template(template).render(values)


def known(value: float | None) -> float | None:
    """The number, or None where it is missing, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else float(value)


def number(value: float | None) -> str:
    """A score for people: three decimals, fewer when large, "n/a" when missing."""
    value = known(value)
    if value is None:
        return "n/a"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.5g}"


def signed(value: float | None) -> str:
    """A change for people: as `number`, always with a sign, a plain 0.000 where nothing moved."""
    text = number(value)
    if known(value) is None or not text.strip("-0."):
        return text.lstrip("-")
    return text if text.startswith("-") else "+" + text


def markdown(text: str) -> str:
    """`text` as itself inside a line of Markdown: none of it is markup, link, cell or HTML tag."""
    return " ".join(text.split()).translate(_MARKDOWN)


def fenced(text: str, language: str) -> str:
    """`text` as a block of code, behind a fence longer than any that it holds."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("flowrl", "templates"),
        autoescape=select_autoescape(("html", "html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=number, signed=signed, markdown=markdown, fenced=fenced)
    return environment

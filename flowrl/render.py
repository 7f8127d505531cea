"""Text from the templates of this package: HTML escaped by jinja2, Markdown by `markdown`."""

import functools
import math
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

_MARKDOWN = str.maketrans(
    {mark: "\\" + mark for mark in "\\`*_{}[]()#+-!|~$:"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
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
    """`text` as itself in one line of Markdown: no markup, link, table cell or HTML tag of it."""
    return " ".join(text.split()).translate(_MARKDOWN)


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
    environment.filters.update(number=number, signed=signed, markdown=markdown)
    return environment

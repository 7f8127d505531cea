"""An odd value of every option is taken as it is written, or refused in sentences that name it."""

import re
from collections.abc import Iterator
from typing import Any, get_origin

import pytest
from pydantic_core import to_jsonable_python

from flowrl.config import Config, parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.config.messages import sections_in, walk
from flowrl.config.yaml12 import flow_yaml, load_yaml
from flowrl.errors import UserError
from flowrl.utils.fields import Options

BASE = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}, {"name": "brightness"}]}
NAMES = {option.path for option in walk(Config)} | {"rewards.0"}
# Values as a recipe has them, that most options should not take.
ODD = [
    "0", "-1", "1", "-3.5", "1e308", "1e400", ".inf", ".nan", "0o17", "1_000", "1:30", "9" * 4000,
    "18446744073709551616", "1.0", "'1'", "true", "yes", "null", "''", "' '", "2026-11-22", "[]",
    "{}", "[null]", "[1]", "[a, b]", "[[[]]]", "{a: 1}", "{kind: ode}", "{kind: [a]}", "a",
    "\u00e9\u4e2d\U0001f600", "\u202eabc", '"\\0"', "a" * 10_000, "../" * 50, "|\n  a\n  b",
]  # fmt: skip


def example(field: Any) -> str:
    """Return a value that fits."""
    if not field.is_required():
        return flow_yaml(to_jsonable_python(field.default))
    return "2" if field.annotation is int else "a:b"


def leaves(model: type[Options] = Config, above: str = "", needs=()) -> Iterator[tuple]:
    """Yield the path of every option of every kind, and what has to be set to reach it."""
    for name, field in model.model_fields.items():
        sections, path = sections_in(field.annotation), f"{above}{name}"
        yield path, needs
        below = f"{path}.0." if get_origin(field.annotation) is list else f"{path}."
        for section in sections:
            wanted = tuple(
                f"{below}{key}={example(inner)}"
                for key, inner in section.model_fields.items()
                if len(sections) > 1 and (key == "kind" or inner.is_required())
            )
            yield from leaves(section, below, needs + wanted)


def is_taken(path: str, needs: tuple[str, ...], value: str) -> bool:
    """Return whether a value is accepted; check what becomes of it, or what is said of it."""
    try:
        data = merge(BASE, parse_overrides([*needs, f"{path}={value}"]))
        printed: Any = parse_config(data).model_dump(mode="json")
    except UserError as error:
        lines = str(error).splitlines()
        assert 1 <= len(lines) <= 8 and max(map(len, lines)) < 900
        words = {re.sub(r"\.\d+", ".0", word.rstrip(".:,;?")) for word in str(error).split()}
        assert words & (NAMES - {"run"}) or path.partition(".0")[0] in str(error)
        return False
    for part in path.split("."):
        printed = printed[int(part)] if isinstance(printed, list) else printed[part]
    wanted = load_yaml(value)
    same = isinstance(wanted, dict | list) or printed == wanted
    assert same or float(printed) == float(wanted)  # as of '1_000'
    return True


MORE = [pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, len(ODD))]


@pytest.mark.parametrize("turn", [0, *MORE])
def test_an_odd_value_of_every_option_is_taken_as_written_or_refused_in_sentences(turn):
    options = [leaf for leaf in leaves() if not leaf[0].endswith(".kind")]
    taken = [
        is_taken(path, needs, ODD[(7 * row + turn) % len(ODD)])
        for row, (path, needs) in enumerate(options)
    ]
    assert len(taken) / 60 < sum(taken) < len(taken) / 2  # both happen

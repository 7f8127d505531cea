"""Mutated recipes and command lines: each is taken as it is written, or refused in sentences.

The mutations come from the options and from the shipped recipes; case n is a function of n alone.
"""

import contextlib
import io
import math
import os
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_origin

import pytest
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from flowrl.cli import main
from flowrl.config import Config
from flowrl.config.load import load_recipe, preset_folder, preset_names
from flowrl.config.messages import name_of, sections_in, type_text, walk
from flowrl.config.yaml12 import flow_yaml, load_yaml
from flowrl.errors import UserError
from flowrl.utils.fields import Options

CASES = 5000
SAMPLE = 100  # of the default tests
FILE = "mine.yaml"
NAMES = {option.path for option in walk(Config)} | {"rewards.0"}

# Values as a recipe has them, that most options should not take.
ODD = [
    "0", "-1", "1", "2", "-3.5", "0.5", "1e-300", "1e308", "1e400", ".inf", "-.inf", ".nan", "010",
    "0o17", "0x1F", "1_000", "1:30", "9" * 5000, "18446744073709551616", "1.0", "'1'", "true",
    "True", "yes", "null", "~", "''", "' '", "none", "2026-11-22", "[]", "{}", "[null]", "[1]",
    "[a, b]", "[[[]]]", "{a: 1}", "{kind: ode}", "{kind: nope}", "{kind: [a]}", "{1: 2}",
    "{null: 1}", "{a: 1, a: 2}", "{? {a: 1} : 2}", "a", "\u00e9\u00df\u4e2d\U0001f600", "\u202eabc",
    '"\\0"', '"\\ud800"', "\udc80", "a\x00b", "a" * 10_000, "a/" * 3000, "../" * 50, "/", "..",
    "[" * 1000 + "]" * 1000, "[" * 1000, "{a: " * 200 + "1" + "}" * 200, "&a [*a]", "*nobody",
    "{<<: {a: 1}}", "{<<: 3}", "!!python/object/apply:os.system [ls]", "!!set {a}", "!!int x",
    "!!binary aGk=", "!mine 3", "--- 1\n--- 2", "# nothing", "%YAML 9.9", "@", "\t", "a: b: c",
    "|\n  a\n  b", ">", "? a", "[1, 2", "{a: 1", "'", '"\\q"', "\ufeff1",
    "[" + ", ".join(["1"] * 3000) + "]", "{" + ", ".join(f"k{i}: 1" for i in range(500)) + "}",
]  # fmt: skip


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """An option: where it is, what it takes, and what has to be set to reach it."""

    path: str
    field: FieldInfo
    needs: tuple[str, ...]


def leaves(
    model: type[Options] = Config, above: str = "", needs: tuple[str, ...] = ()
) -> Iterator[Leaf]:
    """Yield the options of a section and of those below it, of every kind."""
    for name, field in model.model_fields.items():
        sections, path = sections_in(field.annotation), f"{above}{name}"
        yield Leaf(path, field, needs)
        below = f"{path}.0." if get_origin(field.annotation) is list else f"{path}."
        for section in sections:
            wanted = tuple(
                f"{below}{key}={example(inner)}"
                for key, inner in section.model_fields.items()
                if len(sections) > 1 and (key == "kind" or inner.is_required())
            )
            yield from leaves(section, below, needs + wanted)


def example(field: FieldInfo) -> str:
    """Return a value that fits."""
    if not field.is_required():
        return flow_yaml(to_jsonable_python(field.default))
    return {"text": "a:b", "whole number": "2"}.get(type_text(field.annotation), "[a]")


LEAVES = [leaf for leaf in leaves() if not leaf.path.endswith(".kind")]


@dataclass
class Case:
    """A command line, and a recipe of its own in the folder."""

    words: list[str]
    text: str | None = None  # of FILE
    wanted: tuple[str, Any] | None = None  # an option and the value that was written for it


def make_case(number: int) -> Case:
    rng = random.Random(f"recipe {number}")
    preset = rng.choice(preset_names())
    return rng.choice([value_of_an_option, misspelt_option, damaged_text])(rng, preset)


def value_of_an_option(rng: random.Random, preset: str) -> Case:
    """An odd value, one at or beside a limit, one of a list of words, or the default."""
    leaf, wanted = rng.choice(LEAVES), None
    values = [example(leaf.field), *type_text(leaf.field.annotation).split(", ")]
    for limit in leaf.field.metadata:
        for name in {"ge", "le", "gt", "lt"} & set(dir(limit)):
            values += [f"{getattr(limit, name) + step:g}" for step in (-1, -1e-9, 0, 1e-9, 1)]
    value = rng.choice([rng.choice(values), rng.choice(ODD)])
    with contextlib.suppress(UserError):
        wanted = leaf.path, load_yaml(value) if value.strip() else ""
    return Case([preset, *leaf.needs, f"{leaf.path}={value}"], wanted=wanted)


def misspelt_option(rng: random.Random, preset: str) -> Case:
    leaf = rng.choice(LEAVES)
    key, i = leaf.path, rng.randrange(len(leaf.path))
    changes = [key[:i] + key[i + 1 :], key[:i] + rng.choice("_x.- \u00e9") + key[i:], key.upper()]
    changes += [f"{key}.{rng.choice(['0', 'x', 'kind', '-1'])}", key * 200, f"{key}\n", f"--{key}"]
    return Case([preset, f"{rng.choice(changes)}={example(leaf.field)}"])


def damaged_text(rng: random.Random, preset: str) -> Case:
    """A shipped recipe with a part cut out, and something odd in its place."""
    text = (preset_folder() / f"{preset}.yaml").read_text()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", *ODD]) + text[place + rng.randrange(9) :]
    return Case([FILE], text)


# --- what a case has to do ----------------------------------------------------------------------


def run(case: Case) -> tuple[int, str, str]:
    """Run `flowrl train ... --print-config` in this process: exit code, output, and errors."""
    if case.text is not None:
        with open(FILE, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(case.text)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["train", "--print-config", "--", *case.words])
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


def shown(printed: Any, wanted: Any) -> bool:
    """Whether what was written is in what is printed, where numbers may have become floats."""
    if isinstance(wanted, dict) and isinstance(printed, dict):
        return all(key in printed and shown(printed[key], its) for key, its in wanted.items())
    if isinstance(wanted, list) and isinstance(printed, list):
        return len(wanted) == len(printed) and all(map(shown, printed, wanted))
    if type(printed) in (int, float) and isinstance(wanted, str | int | float):
        return float(printed) == float(wanted) or math.isnan(printed) and math.isnan(float(wanted))
    return type(printed) is type(wanted) and printed == wanted


def at(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def check(case: Case) -> bool:
    """Check a case's outcome; return whether it was accepted."""
    code, out, err = run(case)
    assert "Traceback" not in err and "not expected" not in err, err
    if code == 0:
        printed = load_yaml(out)
        recipe, *changes = case.words
        assert shown(printed, load_recipe(recipe, [c.removeprefix("--") for c in changes]))
        if case.wanted is not None:
            assert shown(at(printed, case.wanted[0]), case.wanted[1]), case.wanted
        return True
    lines = err.strip().splitlines()
    assert not out and 1 <= len(lines) <= 10 and max(map(len, lines)) < 900, err
    assert lines[0].startswith("error: ") and lines[-1].endswith((".", "?")), err
    words = {re.sub(r"\.\d+", ".0", word.rstrip(".:,;?")) for word in err.split()}
    named = words & NAMES - {"run"}  # which is a word of sentences, too
    named |= {word for word in words if ".".join(word.split(".")[:2]) in NAMES and "." in word}
    typed = any(name_of(word.partition("=")[0])[:50] in err for word in case.words)
    option = re.search(r"\b(Unknown o|O)ption \S", err)  # as it was written
    assert named or typed or option or FILE in err, err
    return False


def check_cases(numbers: range) -> int:
    """Check cases in an empty folder; return how many of them were accepted."""
    accepted = 0
    for number in numbers:
        case = make_case(number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                accepted += check(case)
            assert set(os.listdir()) <= {FILE}, "something was left behind"
        except BaseException as error:
            raise AssertionError(
                f"case {number}: {case.words!r:.600} {case.text!r:.3000}"
            ) from error
    return accepted


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")


def test_a_sample_of_mutated_recipes_is_taken_as_written_or_refused_in_sentences():
    accepted = check_cases(range(SAMPLE))
    assert SAMPLE / 10 < accepted < SAMPLE * 0.9  # both happen


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, 500))
def test_mutated_recipes_are_taken_as_written_or_refused_in_sentences(first):
    assert check_cases(range(first, first + 500))

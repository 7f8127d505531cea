"""List every option of the configuration, and turn pydantic's errors into sentences."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from flowrl.utils.fields import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option as a user sees it."""

    path: str  # dotted; items of a list have the number 0
    variant: str  # the `kind` that it belongs to, or ""
    expected: str
    default: Any
    required: bool
    meaning: str
    source: str
    is_section: bool


def walk(model: type[Options], prefix: str = "", variant: str = "") -> Iterator[Option]:
    """Yield every option below `model`, sections before their options."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = sections_in(field.annotation)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        yield Option(
            path=path,
            variant=variant,
            expected=type_text(field.annotation) + _limits(field.metadata),
            default=field.default,
            required=field.is_required(),
            meaning=field.description or "",
            source=str(extra.get("source", "")),
            is_section=bool(inner),
        )
        below = f"{path}.0." if get_origin(field.annotation) is list else f"{path}."
        for section in inner:
            yield from walk(section, below, _kind(section) if len(inner) > 1 else variant)


def sections_in(annotation: Any) -> list[type[Options]]:
    """Return the option classes in a type: of a section, its list's items, or its kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    if get_origin(annotation) in (list, Union, UnionType):
        return [section for inner in get_args(annotation) for section in sections_in(inner)]
    return []


def _kind(section: type[Options]) -> str:
    return str(section.model_fields["kind"].default)


def type_text(annotation: Any) -> str:
    """Return a type in a user's words: `int | None` -> "whole number or null"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if sections_in(annotation):
        return "list of sections" if origin is list else "section"
    if origin is Literal:
        return ", ".join(str(value) for value in args)
    if origin in (Union, UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin in (list, tuple):
        items = dict.fromkeys(type_text(arg) for arg in args if arg is not ...)
        return f"list of {' or '.join(items)}"
    if hasattr(annotation, "__metadata__"):
        inner = [m for f in annotation.__metadata__ for m in getattr(f, "metadata", [])]
        return type_text(args[0]) + _limits(inner)
    names = {float: "number", int: "whole number", str: "text", bool: "true or false"}
    return names.get(annotation, "null" if annotation is type(None) else "mapping")


def _limits(metadata: Sequence[Any]) -> str:
    """Return bounds in words: [Gt(0), Lt(1)] -> ", above 0, below 1"."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}
    bounds = [(word, getattr(m, name, None)) for m in metadata for name, word in words.items()]
    return "".join(f", {word} {limit}" for word, limit in bounds if limit is not None)


def resolve(model: type[Options], loc: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """Return the path that a user wrote for a pydantic location, and the keys beside its end.

    pydantic puts names of union members into locations (`window.random.size`): they are left out.
    """
    path: list[str] = []
    here: list[type[Options]] = [model]
    candidates = _keys(here)
    for part in loc:
        section = here[0] if len(here) == 1 else None
        if section and part in section.model_fields:
            candidates = _keys(here)
            path.append(str(part))
            here = sections_in(section.model_fields[str(part)].annotation)
        elif tagged := [s for s in here if len(here) > 1 and _kind(s) == part]:
            here = tagged
        elif isinstance(part, int):
            path.append(str(part))
        elif here:
            candidates = _keys(here)
            path.append(part)
    return path, candidates


def _keys(sections: list[type[Options]]) -> list[str]:
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


MAX_ERRORS = 8  # that are shown at once


def format_errors(model: type[Options], error: ValidationError) -> str:
    """Return one sentence for each wrong option, in the order of the file."""
    problems: dict[str, list[Any]] = {}
    candidates: dict[str, list[str]] = {}
    for detail in error.errors():
        parts, beside = resolve(model, detail["loc"])
        path = ".".join(parts)
        problems.setdefault(path, []).append(detail)
        candidates[path] = beside
    first = islice(problems.items(), MAX_ERRORS)
    sentences = [_sentence(model, path, its, candidates[path]) for path, its in first]
    if (more := len(problems) - MAX_ERRORS) > 0:
        sentences.append(f"{more} other options are wrong, too.")
    return "\n".join(sentences)


def _sentence(model: type[Options], path: str, details: list[Any], candidates: list[str]) -> str:
    detail, name = details[0], name_of(path)
    if detail["type"] == "extra_forbidden":
        if "." in str(detail["loc"][-1]):
            return f"Unknown option {name}: dots join keys on the command line, a file nests them."
        return _unknown(model, path, candidates)
    if detail["type"] == "missing":
        meaning = next((o.meaning for o in walk(model) if o.path == path), "")
        return f"Option {name} is missing" + (f": {meaning}" if meaning else ".")
    if detail["type"].startswith("union_tag"):
        return _tag_sentence(name, detail)
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"Option {name}: {message}." if path else f"{message}."
    wanted = (re.sub(r"^\w+ should (be|have|match) ", "", d["msg"]) for d in details)
    expected = " or ".join(dict.fromkeys(wanted))
    return f"Option {name} is {show(detail['input'])}: expected {expected}."


def _unknown(model: type[Options], path: str, candidates: list[str]) -> str:
    name, parent = name_of(path), path.rpartition(".")[0]
    same = (o for o in walk(model) if o.variant and plain_path(o.path) == plain_path(path))
    if kinds := list(dict.fromkeys(option.variant for option in same)):
        return (
            f"Option {name} is of the kind {', '.join(kinds)}, and {parent} has another: leave it "
            f"out, or set {parent}.kind, too."
        )
    near = _nearest(model, path, candidates)
    names = f"{parent or 'the top level'} has {', '.join(candidates)}."
    return f"Unknown option {name}: {f'did you mean {near}?' if near else names}"


def plain_path(path: str) -> str:
    """Return the path without the numbers of items: rewards.0.weight and rewards.weight are one."""
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def _tag_sentence(name: str, detail: Any) -> str:
    kinds = [kind.strip(" '") for kind in detail.get("ctx", {}).get("expected_tags", "").split(",")]
    if detail["type"] == "union_tag_not_found":
        return f"Option {name}.kind is missing: say which kind the other keys belong to."
    tag = str(detail["ctx"]["tag"])
    near = difflib.get_close_matches(tag[:100], kinds, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"Option {name}.kind is {show(tag)}: expected {', '.join(kinds)}{hint}"


def _nearest(model: type[Options], path: str, candidates: list[str]) -> str:
    """Return the likeliest key: a neighbour of a similar name, else that name elsewhere."""
    parent, _, key = path.rpartition(".")
    key = key[:100]
    near = difflib.get_close_matches(key, candidates, 1, 0.6)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    everywhere = {option.path.rpartition(".")[2]: option.path for option in walk(model)}
    near = difflib.get_close_matches(key, everywhere, 1, 0.75)
    return everywhere[near[0]] if near else ""


def show(value: Any) -> str:
    """Return a value as YAML has it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def name_of(path: str) -> str:
    """Return the name of an option as it was written, quoted and cut where it could be none."""
    return path if path.isprintable() and len(path) <= 100 else show(path)

"""The configuration seen from outside: every option's path, type, default and meaning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from flowrl.utils.fields import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option as a person meets it.

    `path` is dotted, items of a list have the number 0; `variant` is the `kind` that an option
    belongs to, or "".
    """

    path: str
    variant: str
    expected: str
    default: Any
    required: bool
    meaning: str
    source: str
    is_section: bool


def walk(model: type[Section], prefix: str = "", variant: str = "") -> Iterator[Option]:
    """Every option below `model`, sections before what they hold."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = sections_in(field.annotation)
        yield _describe(path, variant, field, bool(inner))
        below = f"{path}.0." if get_origin(field.annotation) is list else f"{path}."
        for section in inner:
            yield from walk(section, below, _kind(section) if len(inner) > 1 else variant)


def _describe(path: str, variant: str, field: FieldInfo, is_section: bool) -> Option:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return Option(
        path=path,
        variant=variant,
        expected=type_text(field.annotation) + _limits(field.metadata),
        default=field.default,
        required=field.is_required(),
        meaning=field.description or "",
        source=str(extra.get("source", "")),
        is_section=is_section,
    )


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section of a field, of each item of its list, or of each `kind` it may take."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (list, Union, UnionType):
        return [section for inner in get_args(annotation) for section in sections_in(inner)]
    return []


def _kind(section: type[Section]) -> str:
    return str(section.model_fields["kind"].default)


def type_text(annotation: Any) -> str:
    """A type in a user's words: `int | None` -> "whole number or null"."""
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
    """Bounds in words: [Gt(0), Lt(1)] -> ", above 0, below 1"."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}
    found = [(word, getattr(m, name, None)) for m in metadata for name, word in words.items()]
    return "".join(f", {word} {limit}" for word, limit in found if limit is not None)


def resolve(model: type[Section], loc: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """A pydantic error location -> the path a user wrote, and the keys known beside its end.

    pydantic puts names of union members into the location (`window.random.size`), which no
    user wrote: they are left out.
    """
    path: list[str] = []
    here: list[type[Section]] = [model]
    known = _keys(here)
    for part in loc:
        section = here[0] if len(here) == 1 else None
        if section and part in section.model_fields:
            known = _keys(here)
            path.append(str(part))
            here = sections_in(section.model_fields[str(part)].annotation)
        elif tagged := [s for s in here if len(here) > 1 and _kind(s) == part]:
            here = tagged
        elif isinstance(part, int):
            path.append(str(part))
        elif here:
            known = _keys(here)
            path.append(part)
    return path, known


def _keys(sections: list[type[Section]]) -> list[str]:
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))

"""pydantic's errors as sentences: the full key, what was got, what was expected, the nearest."""

import difflib
from typing import Any

from pydantic import ValidationError

from flowrl.config.schema import resolve, walk
from flowrl.utils.fields import Section

_WORDS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "dict_type": "keys and values",
    "list_type": "a list",
    "tuple_type": "a list",
}


def complain(model: type[Section], error: ValidationError) -> str:
    """One sentence for each option that is wrong, in the order of the file."""
    problems: dict[str, list[Any]] = {}
    known: dict[str, list[str]] = {}
    for detail in error.errors():
        parts, beside = resolve(model, detail["loc"])
        path = ".".join(parts)
        problems.setdefault(path, []).append(detail)
        known[path] = beside
    suggested = {
        _nearest(model, path, known[path])
        for path, details in problems.items()
        if details[0]["type"] == "extra_forbidden"
    }
    sentences = [
        _sentence(model, path, details, known[path])
        for path, details in problems.items()
        # A misspelt required key is both unknown and missing; the first says it all.
        if not (details[0]["type"] == "missing" and path in suggested)
    ]
    return "\n".join(sentences)


def _sentence(model: type[Section], path: str, details: list[Any], known: list[str]) -> str:
    detail = details[0]
    if detail["type"] == "extra_forbidden" and "." in str(detail["loc"][-1]):
        return f"Unknown option {path}: dots join keys on the command line, a file nests them."
    if detail["type"] == "extra_forbidden":
        near = _nearest(model, path, known)
        hint = f"; did you mean {near}?" if near else "."
        where = path.rpartition(".")[0]
        return f"Unknown option {path}: {where or 'the top level'} has {', '.join(known)}{hint}"
    if detail["type"] == "missing":
        meaning = next((o.meaning for o in walk(model) if o.path == path), "")
        return f"Option {path} is missing" + (f": {meaning}" if meaning else ".")
    if detail["type"].startswith("union_tag"):
        return _tag_sentence(path, detail)
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"Option {path}: {message}." if path else f"{message}."
    wanted = " or ".join(dict.fromkeys(_expected(d) for d in details))
    return f"Option {path} is {show(detail['input'])}: expected {wanted}."


def _tag_sentence(path: str, detail: Any) -> str:
    kinds = [kind.strip(" '") for kind in detail.get("ctx", {}).get("expected_tags", "").split(",")]
    if detail["type"] == "union_tag_not_found":
        return f"Option {path}.kind is missing: say which kind the other keys belong to."
    tag = str(detail["ctx"]["tag"])
    near = difflib.get_close_matches(tag, kinds, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"Option {path}.kind is {tag!r}: expected {', '.join(kinds)}{hint}"


def _expected(detail: Any) -> str:
    if detail["type"] in _WORDS:
        return _WORDS[detail["type"]]
    text = detail["msg"].removeprefix("Input should be ")
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def _nearest(model: type[Section], path: str, known: list[str]) -> str:
    """The likeliest key: a neighbour of nearly the same name, else the same name elsewhere."""
    parent, _, key = path.rpartition(".")
    near = difflib.get_close_matches(key, known, 1, 0.6)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    everywhere = {option.path.rpartition(".")[2]: option.path for option in walk(model)}
    near = difflib.get_close_matches(key, everywhere, 1, 0.75)
    return everywhere[near[0]] if near else ""


def show(value: Any) -> str:
    """A value as it is written in YAML, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

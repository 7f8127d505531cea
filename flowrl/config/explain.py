"""What an option means: its meaning, what it takes, its default and where that comes from."""

import difflib
from typing import Any

from flowrl.config import Config
from flowrl.config.messages import Option, plain_path, walk
from flowrl.config.yaml12 import flow_yaml
from flowrl.errors import UserError
from flowrl.utils.fields import Options


def explain(key: str = "") -> str:
    """Return a text about an option, a section and its options, or (empty) all sections.

    `key` is dotted. Raises UserError for an unknown one.
    """
    options = list(walk(Config))
    if not key:
        top = [option for option in options if "." not in option.path]
        return "\n".join(f"{option.path:<12}{option.meaning}" for option in top)
    path = plain_path(key)
    # Several kinds may have an option of this name, such as the windows of several trees.
    chosen = [option for option in options if plain_path(option.path) == path]
    if not chosen:
        raise UserError(_unknown(key, path, options))
    inside = [option for option in options if plain_path(option.path).rpartition(".")[0] == path]
    texts = [*map(_option, chosen), *map(_line, inside)]
    return "\n\n".join(dict.fromkeys(texts))


def _option(option: Option) -> str:
    """Return all that is known of one option."""
    lines = [_head(option), f"  {option.meaning}"]
    if not option.is_section:
        lines.append(f"  takes:   {option.expected}")
    lines.append(f"  default: {default_text(option)}")
    if option.source:
        lines.append(f"  source:  {option.source}")
    return "\n".join(lines)


def _head(option: Option) -> str:
    return option.path + (f" (when kind is {option.variant})" if option.variant else "")


def _line(option: Option) -> str:
    """Return an option of a section in two lines; a section in it is explained by its own name."""
    return f"{_head(option)} = {default_text(option)}\n  {option.meaning}"


def default_text(option: Option) -> str:
    """Return an option's default as it is written in a recipe."""
    return "(required)" if option.required else flow_yaml(_written(option.default))


def _written(value: Any) -> Any:
    """Return a value as plain data; of a section its kind and what differs from its defaults."""
    if not isinstance(value, Options):
        return value
    return {
        name: _written(getattr(value, name))
        for name, field in type(value).model_fields.items()
        if name == "kind" or getattr(value, name) != field.default
    }


def _unknown(key: str, path: str, options: list[Option]) -> str:
    last_parts = {option.path.rpartition(".")[2]: plain_path(option.path) for option in options}
    names = {plain_path(option.path): plain_path(option.path) for option in options} | last_parts
    near = difflib.get_close_matches(path, names, 1, 0.6)
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    return f"There is no option {key!r}.{hint or ' `flowrl explain` lists the sections.'}"

"""What an option means: its meaning, what it takes, its default and where that comes from."""

import difflib
from collections.abc import Iterable
from typing import Any

from flowrl.config import Config
from flowrl.config.arguments import ALIASES
from flowrl.config.messages import Option, walk
from flowrl.config.yaml12 import flow_yaml
from flowrl.errors import UserError
from flowrl.utils.fields import Options


def explain(key: str = "") -> str:
    """Return a text about an option, a section and its options, or (empty) all sections.

    `key` is dotted, or an alias such as learning_rate. Raises UserError for an unknown one.
    """
    options = list(walk(Config))
    if not key:
        top = [option for option in options if "." not in option.path]
        return "\n".join(f"{option.path:<12}{option.meaning}" for option in top)
    path = _path(key, options)
    # Several kinds may have an option of this name, such as the windows of several trees.
    same_path = [option for option in options if _plain(option.path) == path]
    if not same_path:
        raise UserError(_unknown(key, path, options))
    if same_path[0].is_section:
        return _section(path, same_path, options)
    return _blank_lines(_option(option) for option in same_path)


def _path(key: str, options: list[Option]) -> str:
    name = key.removeprefix("--").replace("-", "_")
    is_section = any(option.path == name for option in options if "." not in option.path)
    return _plain(name if is_section else ALIASES.get(name, name))


def _plain(path: str) -> str:
    # `rewards.0.weight` and `rewards.weight` are one.
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def _blank_lines(texts: Iterable[str]) -> str:
    """Join different texts with a blank line between them."""
    return "\n\n".join(dict.fromkeys(texts))


def _option(option: Option) -> str:
    """Return all that is known of one option."""
    lines = [option.path + (f" (when kind is {option.variant})" if option.variant else "")]
    lines.append(f"  {option.meaning}")
    lines.append(f"  takes:   {option.expected}")
    lines.append(f"  default: {default_text(option)}")
    if option.source:
        lines.append(f"  source:  {option.source}")
    return "\n".join(lines)


def _section(path: str, same_path: list[Option], options: list[Option]) -> str:
    """Return a section's meaning and defaults, and its options, of several kinds kind by kind."""
    lines = [f"{path}: {same_path[0].meaning}"]
    for default in dict.fromkeys(default_text(option) for option in same_path):
        kinds = [o.variant for o in same_path if o.variant and default_text(o) == default]
        where = f" for {', '.join(dict.fromkeys(kinds))}" if kinds else ""
        lines += [f"  default: {default}{where}"] * (default != "{}")
    inside = [o for o in options if _plain(o.path).rpartition(".")[0] == path]
    kinds = [o for o in inside if o.path.endswith(".kind") and o.default == o.variant]
    if not kinds:
        variants = {o.variant for o in same_path}
        for option in inside:
            within = [o.variant for o in inside if o.path == option.path]
            only = "" if variants == set(within) else f" (when kind is {', '.join(within)})"
            lines.append(f"\n{_line(option, '', only)}")
        return "\n".join(dict.fromkeys(lines))
    blocks = []
    for kind in kinds:
        rest = [o for o in inside if o.variant == kind.variant and not o.path.endswith(".kind")]
        block = [f"kind: {kind.variant}\n  {kind.meaning}", *(_line(o, "  ") for o in rest)]
        blocks.append("\n".join(dict.fromkeys(block)))
    return _blank_lines(["\n".join(lines), *blocks])


def _line(option: Option, indent: str, only: str = "") -> str:
    """Return an option in two lines; a section among them is explained by its own name."""
    default = default_text(option)
    head = option.path.rpartition(".")[2] + (
        f" = {default}" if default != "{}" or not option.is_section else ""
    )
    more = f" (flowrl explain {_plain(option.path)})" if option.is_section else ""
    return f"{indent}{head}{more}{only}\n{indent}  {option.meaning}"


def default_text(option: Option) -> str:
    """Return an option's default as it is written in a recipe."""
    return "(required)" if option.required else flow_yaml(_written(option.default))


def _written(value: Any) -> Any:
    """Return a value as plain data; of a section its kind and what differs from its defaults."""
    if not isinstance(value, Options):
        return value
    fields = type(value).model_fields.items()
    written = {name: getattr(value, name) for name, _ in fields}
    return {
        name: _written(written[name])
        for name, field in fields
        if name == "kind" or written[name] != field.default
    }


def _unknown(key: str, path: str, options: list[Option]) -> str:
    paths = {_plain(option.path): option.path for option in options}
    last_parts = {name.rpartition(".")[2]: name for name in paths}
    near = difflib.get_close_matches(path, [*paths, *ALIASES], 1, 0.6) or [
        last_parts[name]
        for name in difflib.get_close_matches(path.split(".")[-1], last_parts, 1, 0.7)
    ]
    hint = f" Did you mean {near[0]}?" if near else " `flowrl explain` lists the sections."
    return f"There is no option {key!r}.{hint}"

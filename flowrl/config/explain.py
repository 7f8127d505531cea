"""What an option means: its meaning, what it takes, its default and where that comes from."""

import difflib

from flowrl.config import Config
from flowrl.config.arguments import ALIASES
from flowrl.config.messages import Option, show, walk
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
    path = _path(key)
    same_path = [option for option in options if _plain(option.path) == path]
    if not same_path:
        raise UserError(_unknown(key, path, options))
    if same_path[0].is_section:
        return _section(same_path[0], options)
    # One text for what several kinds share, such as the windows of several trees.
    return "\n\n".join(dict.fromkeys(_one(option) for option in same_path))


def _path(key: str) -> str:
    name = key.removeprefix("--").replace("-", "_")
    sections = {option.path for option in walk(Config) if "." not in option.path}
    return _plain(name if name in sections else ALIASES.get(name, name))


def _plain(path: str) -> str:
    # `rewards.0.weight` and `rewards.weight` are one.
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def _one(option: Option) -> str:
    lines = [option.path + (f" (when kind is {option.variant})" if option.variant else "")]
    lines.append(f"  {option.meaning}")
    lines.append(f"  takes:   {option.expected}")
    lines.append(
        f"  default: {'none, it must be given' if option.required else default_text(option)}"
    )
    if option.source:
        lines.append(f"  source:  {option.source}")
    return "\n".join(lines)


def _section(section: Option, options: list[Option]) -> str:
    inside = [o for o in options if _plain(o.path).startswith(f"{_plain(section.path)}.")]
    lines = [f"{section.path}: {section.meaning}", ""]
    for option in inside:
        kind = f" [{option.variant}]" if option.variant else ""
        lines.append(f"  {option.path}{kind} = {default_text(option)}")
        lines.append(f"      {option.meaning}")
    return "\n".join(lines)


def default_text(option: Option) -> str:
    """Return an option's default as it is written in a recipe."""
    if option.required:
        return "(required)"
    if isinstance(option.default, Options):
        return show(option.default.model_dump()) if "kind" in option.default.model_dump() else "..."
    return show(option.default)


def _unknown(key: str, path: str, options: list[Option]) -> str:
    paths = {_plain(option.path): option.path for option in options}
    last_parts = {name.rpartition(".")[2]: name for name in paths}
    near = difflib.get_close_matches(path, [*paths, *ALIASES], 1, 0.6) or [
        last_parts[name]
        for name in difflib.get_close_matches(path.split(".")[-1], last_parts, 1, 0.7)
    ]
    hint = f" Did you mean {near[0]}?" if near else " `flowrl explain` lists the sections."
    return f"There is no option {key!r}.{hint}"

"""Recipes: YAML files with a parent and overrides on top, read into plain dictionaries."""

import contextlib
import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from flowrl.config.messages import name_of, show
from flowrl.config.yaml12 import MAX_TEXT, load_yaml, shorten
from flowrl.errors import UserError
from flowrl.utils.untrusted import read_text


def preset_folder() -> Path:
    """Return the folder of packaged recipes; in a checkout, `configs` beside the package."""
    packaged = Path(str(files("flowrl"))) / "configs"
    return packaged if packaged.is_dir() else packaged.parent.parent / "configs"


def preset_names() -> list[str]:
    """Return the presets' names; files that start with `_` are only parents."""
    return sorted(p.stem for p in preset_folder().glob("*.yaml") if not p.name.startswith("_"))


def find_recipe(source: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a preset or a path, which may be relative to the folder `beside`."""
    places = [Path(source), preset_folder() / f"{source}.yaml"]
    for candidate in [beside / source, *places] if beside else places:
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            if candidate.is_file():
                return candidate
    near = difflib.get_close_matches(str(source)[:100], preset_names(), 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"There is no recipe {show(str(source))}.{hint} A recipe is a YAML file or one of the "
        "presets that `flowrl recipes` lists."
    )


def merge(base: Any, over: Any, path: str = "") -> Any:
    """Return `over` laid on `base`: mappings merge, anything else replaces.

    A mapping whose `kind` changes replaces its parent whole: keys of one kind mean nothing to
    another. A mapping of numbers on a list changes those items (`rewards.0.weight`).
    path: dotted, of the option that both are given for; for messages.
    """
    if isinstance(base, list) and isinstance(over, dict) and over:
        return _merge_items(base, over, path)
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    if "kind" in over and over["kind"] != base.get("kind", over["kind"]):
        return over
    below = f"{path}." if path else ""
    return base | {k: merge(base.get(k), value, f"{below}{k}") for k, value in over.items()}


def _merge_items(base: list[Any], over: dict[str, Any], path: str) -> list[Any]:
    items = list(base)
    for key, value in over.items():
        number = int(key) if key.isdecimal() and len(key) < 9 else len(items)
        if number >= len(items):
            raise UserError(
                f"There is no item {name_of(key)} of {path or 'the list'}: it has {len(items)} "
                "items, counted from 0."
            )
        items[number] = merge(items[number], value, f"{path}.{key}")
    return items


def differences(before: Any, now: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the leaves in which nested mappings differ, (before, now) by dotted name.

    Of a part whose `kind` differs that alone is named: the rest means nothing to the other.
    """
    if before == now:
        return {}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = (dict(enumerate(items)) for items in (before, now))
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {name: (before, now)}
    if before.get("kind") != now.get("kind"):
        return {f"{name}.kind": (before.get("kind"), now.get("kind"))}
    changed: dict[str, tuple[Any, Any]] = {}
    for key in {**now, **before}:
        inner = f"{name}.{key}" if name else key
        changed |= differences(before.get(key), now.get(key), inner)
    return changed


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return `["optim.lr=1e-4"]` as `{"optim": {"lr": 0.0001}}`.

    Values are YAML, so lists and mappings work; nothing after `=` is the empty text.
    """
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(
                f"Cannot read {show(override)}: expected KEY=VALUE, as in optim.lr=1e-4."
            )
        value = _override_value(key, text)
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(parts), value)
        tree = merge(tree, nested)
    return tree


def _override_value(key: str, text: str) -> Any:
    value = load_yaml(text, f"the value of {name_of(key)}") if text.strip() else ""
    if re.search(r"(^|\s)#", text) and (
        value is None or isinstance(value, str) and "#" not in value
    ):
        raise UserError(
            f"The value of {name_of(key)} is {show(text)}, where YAML takes # for the beginning of "
            "a comment: put the value in quotes."
        )
    return value


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a preset or file, its parents (`extends`), then the overrides.

    `source` "" stands for an empty recipe.
    Raises UserError for unreadable files, duplicate keys and circular parents.
    """
    parts = _read(find_recipe(source), []) if source else []
    # One by one, so that a null clears what stands below it before the next override.
    parts += [parse_overrides([override]) for override in overrides]
    return functools.reduce(merge, parts, {})


def _read(path: Path, children: list[Path]) -> list[dict[str, Any]]:
    """Return the recipes of the parents, oldest first, and of the file."""
    path = path.resolve()
    if path in children:
        chain = " -> ".join(child.name for child in [*children, path])
        raise UserError(f"{path.name} extends itself: {chain}.")
    try:
        text = read_text(path, limit=4 * MAX_TEXT)  # bytes
    except (OSError, UserError) as error:
        raise UserError(f"Cannot read the recipe {path}: {shorten(error)}.") from error
    data = load_yaml(text, path.name)
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise UserError(f"{path.name} holds a {type(data).__name__}, expected keys and values.")
    parent = data.pop("extends", None)
    if parent is None:
        return [data]
    if not isinstance(parent, str):
        raise UserError(f"`extends` in {path.name} is {show(parent)}, expected one preset or file.")
    try:
        source = find_recipe(parent, path.parent)
    except UserError as error:
        raise UserError(f"`extends` in {path.name}: {error}") from error
    return [*_read(source, [*children, path]), data]

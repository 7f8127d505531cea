"""Read and write YAML with the scalars of YAML 1.2, bounded in size and depth.

PyYAML follows YAML 1.1, where `1e-4` is text, `no` is false and `1:30` is ninety. Recipes come from
anybody, so that nothing here builds Python objects and no text keeps a machine busy.
"""

import re
from typing import Any

import yaml

from flowrl.config.messages import show
from flowrl.errors import UserError

# Far above every recipe.
MAX_TEXT = 100_000  # characters
MAX_DEPTH = 40

# The scalars of YAML 1.2's core schema; the last field lists the characters that may start one.
_SCALARS = [
    ("bool", r"true|false", "tf"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
]

TAG = "tag:yaml.org,2002:{}"
# libyaml reads a recipe 10 times as fast; not every build of PyYAML has it.
_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE_LOADER):
    """Take YAML 1.2 scalars, keys that are texts, and no key twice in one mapping."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors: dict[str | None, Any] = {  # that of None refuses all other tags
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *map(TAG.format, ("null", "bool", "float", "str", "seq", "map")))
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not key.tag.endswith(":str") or not isinstance(key, yaml.ScalarNode):
                written = show(key.value) if isinstance(key, yaml.ScalarNode) else "of a mapping"
                raise _refusal(f"the key {written} is no text: write it in quotes", key)
            if key.value in seen:
                raise _refusal(f"the key {show(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quote exactly the text that `_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Unquoted, the emitter folds exotic line ends (NEL, LS, PS) into plain ones.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(TAG.format("str"), text, style=style)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


def _refusal(problem: str, node: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            TAG.format(_tag), re.compile(f"^(?:{_pattern})$"), list(_first)
        )
_Loader.add_constructor(TAG.format("int"), _construct_int)
_Dumper.add_representer(str, _represent_text)


def load_yaml(text: str, where: str = "the text") -> Any:
    """Parse YAML with 1.2 scalars.

    Args:
        where: what the text is, for errors.

    Raises:
        UserError: text that is not YAML, is too large, or has aliases, which a few lines of can
            stand for billions of values. It names `where` and the line.
    """
    if len(text) > MAX_TEXT:
        raise UserError(f"{where} has {len(text):,} characters, expected at most {MAX_TEXT:,}.")
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line} is not valid YAML: {shorten(error.problem)}.") from error
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last as of `!!bool maybe`
        raise UserError(f"{where} is not valid YAML: {shorten(error)}.") from error


def _check_events(text: str) -> None:
    """Refuse aliases and deep nesting before any object is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} deep", event)
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(f"*{event.anchor:.60} repeats a value: write the value itself", event)


def dump_yaml(data: Any) -> str:
    """Return YAML text that `load_yaml` reads back to an equal object."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def flow_yaml(data: Any) -> str:
    """Return a value in one line of YAML, as on a command line."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def shorten(problem: object) -> str:
    """Return a parser's message in one line of at most 160 characters."""
    text = " ".join(str(problem).split()).rstrip(".")
    return text if len(text) <= 160 else f"{text[:157]}..."

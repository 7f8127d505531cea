"""Recipes: YAML files with a parent and overrides on top, read into plain dictionaries."""

import contextlib
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count, islice
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.messages import name_of, show
from flowrl.errors import UserError

MAX_PARENTS = 3
# Far above every recipe, and low enough that no text keeps a machine busy.
MAX_TEXT = 100_000  # characters
MAX_VALUES = 20_000  # with aliases counted as often as they stand
MAX_DEPTH = 40
MAX_DIGITS = 40

# The scalars of YAML 1.2's core schema. PyYAML follows 1.1, where `1e-4` is text, `no` is false
# and `1:30` is ninety. The last field names the characters that a scalar may start with.
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
    ("merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars, keys that are texts, and no key twice in one mapping."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors: dict[str | None, Any] = {
        f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
        for kind in ("null", "bool", "float", "str", "seq", "map")
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.sizes: dict[int, int] = {}  # keys of mappings with merges, by the node's id

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not key.tag.endswith((":str", ":merge")) or not isinstance(key, yaml.ScalarNode):
                written = show(key.value) if isinstance(key, yaml.ScalarNode) else "of a mapping"
                raise _refusal(f"the key {written} is no text: write it in quotes", key)
            if key.value in seen:
                raise _refusal(f"the key {show(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Lay merged mappings (`<<: *name`) into one, which copies their keys.

        PyYAML leaves repeated keys out from 6.0.4 on; here they count, as in earlier versions.
        """
        copied = merges = 0
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merges += 1
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(part, yaml.MappingNode):
                        self.flatten_mapping(part)
                        copied += self.sizes.get(id(part), len(part.value))
                    if copied > MAX_VALUES:
                        raise _refusal(f"`<<` merges more than {MAX_VALUES:,} keys", key)
        if merges:
            self.sizes[id(node)] = copied + len(node.value) - merges
        super().flatten_mapping(node)


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Unquoted, the emitter folds exotic line ends (NEL, LS, PS) into plain ones.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
        )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:
        raise _refusal(f"a number of {len(text):,} digits, expected at most {MAX_DIGITS}", node)
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    raise _refusal(
        f"the tag {show(node.tag)} is not understood: write text, numbers, lists and mappings", node
    )


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor(None, _refuse_tag)  # type: ignore[type-var]


def load_yaml(text: str, where: str = "the text") -> Any:
    """Parse YAML with 1.2 scalars. Raises UserError that names `where` and the line."""
    if len(text) > MAX_TEXT:
        raise UserError(f"{where} has {len(text):,} characters, expected at most {MAX_TEXT:,}.")
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds no Python objects
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line} is not valid YAML: {_short(error.problem)}.") from error
    except RecursionError as error:
        raise UserError(_too_deep(where)) from error
    except LookupError as error:  # as of `!!bool maybe`
        raise UserError(f"{where} is not valid YAML: a value does not suit its tag.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML: {_short(error)}.") from error
    check_size(data, where)
    return data


def _short(problem: object) -> str:
    """Return a parser's message in one line, cut where it quotes much."""
    text = " ".join(str(problem).split()).rstrip(".")
    return text if len(text) <= 160 else f"{text[:157]}..."


def check_size(data: Any, where: str) -> None:
    """Raise UserError for data that is nested deeply or holds very many values.

    A few lines of aliases can stand for billions of values, or for one that holds itself.
    """
    values, level = 0, [data]
    for depth in count():
        values += len(level)
        if values > MAX_VALUES:
            raise UserError(
                f"{where} stands for more than {MAX_VALUES:,} values, aliases (*name) counted "
                "wherever they stand: leave most of them out."
            )
        if depth > MAX_DEPTH:
            raise UserError(_too_deep(where))
        below = (inner for value in level for inner in _inside(value))
        level = list(islice(below, MAX_VALUES + 1))
        if not level:
            return


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def texts_in(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in nested data, keys too, with the dotted path to it."""
    if isinstance(data, str):
        yield path, data
    for key, value in data.items() if isinstance(data, dict) else enumerate(_inside(data)):
        below = f"{path}.{key}" if path else str(key)
        if isinstance(key, str):
            yield below, key
        yield from texts_in(value, below)


def _too_deep(where: str) -> str:
    return f"{where} is nested more than {MAX_DEPTH} deep, expected sections, options and values."


def dump_yaml(data: Any) -> str:
    """Return YAML text that `load_yaml` reads back to an equal object."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


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
        f"There is no recipe {show(str(source))}: expected a YAML file or one of the presets "
        f"{', '.join(preset_names())}.{hint}"
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
        number = int(key) if key.isdecimal() and len(key) <= MAX_DIGITS else len(items)
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
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**now, **before}:
        inner = f"{name}.{key}" if name else key
        found |= differences(before.get(key), now.get(key), inner)
    return found


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
        if len(parts) > MAX_DEPTH:
            raise UserError(_too_deep(f"The option {name_of(key)}"))
        if "[" in key:
            dotted = re.sub(r"\[(\w+)\]", r".\1", key)
            raise UserError(
                f"Unknown option {name_of(key)}: write items of lists as {name_of(dotted)}."
            )
        value = _override_value(key, text)
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(parts), value)
        tree = merge(tree, nested)
    check_size(tree, "the command line")
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
    """Read a preset or file, its parents (`extends`, at most three deep), then the overrides.

    `source` "" stands for an empty recipe. Old option names become the new ones, with a warning.
    Raises UserError for unreadable files, duplicate keys and circular parents.
    """
    with_new_names([parse_overrides(overrides)], warn=False)  # refuses two names of one option
    parts = _read(find_recipe(source), []) if source else []
    parts += [parse_overrides([override]) for override in overrides]  # null clears what is below
    return functools.reduce(merge, with_new_names(parts), {})


def _read(path: Path, children: list[Path]) -> list[dict[str, Any]]:
    """Return the recipes of the parents, oldest first, and of the file."""
    path = path.resolve()
    if path in children:
        raise UserError(f"{path.name} extends itself: {_chain([*children, path])}.")
    if len(children) > MAX_PARENTS:
        raise UserError(
            f"{children[0].name} has more than {MAX_PARENTS} parents in a row "
            f"({_chain([*children, path])}): shorten the chain of `extends`."
        )
    try:
        with open(path, encoding="utf-8") as file:
            data = load_yaml(file.read(MAX_TEXT + 1), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the recipe {path}: {_short(error)}.") from error
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


def _chain(paths: list[Path]) -> str:
    return " -> ".join(path.name for path in paths)


# --- Options under the names that they had in version 0.1; to be removed after the next one -------

OLD_NAMES = {
    "rollout.prompts": "prompts_per_iteration",
    "rollout.steps": "num_inference_steps",
    "rollout.guidance": "guidance_scale",
    "rollout.training_guidance": "training_guidance_scale",
    "rollout.negative": "negative_prompt",
    "rollout.explore.steps": "num_inference_steps",
    "objective.draws": "noising",
    "evaluation.images": "num_images",
    "evaluation.steps": "num_inference_steps",
    "evaluation.guidance": "guidance_scale",
    "run.keep": "keep_checkpoints",
}


def with_new_names(parts: Sequence[dict[str, Any]], *, warn: bool = True) -> list[dict[str, Any]]:
    """Return recipes with old option names replaced; one warning names all that were.

    Raises UserError for a recipe that has an option under both names.
    """
    found: dict[str, str] = {}
    renamed = []
    for part in parts:
        for old, new in OLD_NAMES.items():
            before, part = part, rename(part, old, new)
            if part != before:
                found[old] = f"{old.rpartition('.')[0]}.{new}"
        renamed.append(part)
    if found and warn:
        pairs = ", ".join(f"{old} is now {new}" for old, new in found.items())
        text = f"Options have new names: {pairs}. The old ones stop working in the next version."
        warnings.warn(text, FutureWarning, stacklevel=3)
    return renamed


def rename(data: Any, path: str, new: str) -> Any:
    """Return nested mappings with the key at a dotted path called `new`, in the same place."""
    key, _, rest = path.partition(".")
    if not isinstance(data, dict) or key not in data:
        return data
    if rest:
        return {k: rename(v, rest, new) if k == key else v for k, v in data.items()}
    if new in data:
        raise UserError(f"{key} is the old name of {new}, and both are given: keep {new}.")
    return {new if k == key else k: v for k, v in data.items()}


def with_old_names(section: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a section's options under their first names, for keys that earlier runs have saved."""
    for old, new in OLD_NAMES.items():
        head, _, name = old.rpartition(".")
        if head == section:
            options = rename(options, new, name)
    return options


# --- What people type: options under the names that diffusers' own training scripts use --------

ALIASES = {
    "pretrained_model_name_or_path": "pipeline.path",
    "revision": "pipeline.revision",
    "mixed_precision": "pipeline.dtype",
    "resolution": "pipeline.height",
    "rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "adam_weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "max_train_steps": "run.iterations",
    "checkpointing_steps": "run.checkpoint_every",
    "output_dir": "run.output_dir",
    "seed": "run.seed",
    "report_to": "run.trackers",
    "push_to_hub": "run.push_to_hub",
    "hub_model_id": "run.hub_model_id",
    "gradient_checkpointing": "memory.gradient_checkpointing",
    "guidance_scale": "rollout.guidance_scale",
    "num_inference_steps": "rollout.num_inference_steps",
    "prompts": "prompts.train",
    "reward": "rewards",
}
_VALUES: dict[str, Callable[[str], list[str]]] = {
    "mixed_precision": lambda v: [f"pipeline.dtype={'fp32' if v == 'no' else v}"],
    "resolution": lambda v: [f"pipeline.height={v}", f"pipeline.width={v}"],
    "report_to": lambda v: [f"run.trackers=[{'' if v == 'none' else v}]"],
    "reward": lambda v: ["rewards=[" + ", ".join(f"{{name: '{n}'}}" for n in v.split(",")) + "]"],
}
# What a recipe says of its own prompts and rewards means nothing to others. Said first, so that
# the rest of the command line can say otherwise.
_REPLACED = {
    "--prompts": (
        "prompts.balance=null", "prompts.weights=null", "prompts.allow_overlap=false",
        "prompts.held_out=0.1", "evaluation.prompts=null", "evaluation.balance=null",
    ),
    "--reward": ("evaluation.quality=null",),
}  # fmt: skip
_FLAGS = ("push_to_hub", "gradient_checkpointing")  # alone they are true
_SECTION_NAMES = ("prompts", "rewards")  # with dashes they are aliases, without them sections


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArguments:
    """A sorted command line."""

    recipe: str
    overrides: list[str]  # a.b=c
    resume: str | None  # checkpoint


def sort_arguments(arguments: Sequence[str]) -> CommandArguments:
    """Sort `quickstart --output_dir runs/a optim.lr=1e-4` into recipe and overrides.

    Known names may be written `--name value`, `--name=value` or `name=value`, with dashes or
    underscores; dotted keys too. `--reward` may be repeated. `--prompts` and `--reward` replace
    what the recipe says of its own: a tenth of the prompts is held out, unless evaluation.prompts
    or prompts.held_out is given, too. Raises UserError for a name without a value and for two
    recipes.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    rewards: list[str] = []
    replaced: list[str] = []
    resume: str | None = None
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") and "=" not in word:
            recipes.append(word)
            continue
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").replace("-", "_")
        if not equals:
            value = _next_value(word, plain, rest)
        replaced += _REPLACED.get(name, ())
        if plain in ("resume", "resume_from_checkpoint"):
            resume = value
        elif name == "--reward":
            rewards.append(value)
        else:
            overrides += _translate(name, value)
    overrides += _translate("--reward", ",".join(rewards)) if rewards else []
    if len(recipes) > 1:
        raise UserError(
            f"Got two recipes, {show(recipes[0])} and {show(recipes[1])}, expected one; changes "
            "are written KEY=VALUE, as in optim.lr=1e-4."
        )
    return CommandArguments(
        recipe="".join(recipes), overrides=[*dict.fromkeys(replaced), *overrides], resume=resume
    )


def _next_value(word: str, plain: str, rest: list[str]) -> str:
    """Take the value of `--name` out of the words after it; flags may stand alone."""
    if plain in _FLAGS:
        said = bool(rest) and rest[0].lower() in ("true", "false")
        return rest.pop(0).lower() if said else "true"
    if not rest:
        raise UserError(f"{word} has no value: write {word} VALUE or KEY=VALUE.")
    return rest.pop(0)


def _translate(name: str, value: str) -> list[str]:
    key = name.removeprefix("--")
    plain = key.replace("-", "_")
    if plain == "hub_token":
        raise UserError(
            "--hub_token would leave a secret in the shell's history and the list of processes: "
            "set HF_TOKEN in the environment, or log in once with hf auth login."
        )
    if plain not in ALIASES or (key == name and plain in _SECTION_NAMES):
        return [f"{key}={value}"]
    return _VALUES[plain](value) if plain in _VALUES else [f"{ALIASES[plain]}={value}"]

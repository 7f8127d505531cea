"""Print the size of the house: lines, commands, options, fields written twice, banned names.

    python -m scripts.count_house

Prints each count beside its goal and never fails: goals are judged by people, in a review.
"""

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from flowrl.cli import app
from flowrl.config import Config
from flowrl.config.messages import walk

ROOT = Path(__file__).parents[1]
# Participles and determiners that say nothing of what a name holds (CONTRIBUTING, "Names").
BANNED = {"found", "own", "known", "asked", "told", "kept", "others", "given", "there"}


def trees(*folders: str) -> dict[Path, ast.Module]:
    """Return the parsed Python files below the folders, as git lists them."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


def lines(*folders: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in trees(*folders))


def option_paths() -> set[str]:
    """Return the dotted paths of all options, without sections and the `kind` of a section."""
    options = [option for option in walk(Config) if not option.is_section]
    return {option.path for option in options if option.path.rpartition(".")[2] != "kind"}


def fields(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yield each class with the names of its annotated fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            annotated = (s for s in node.body if isinstance(s, ast.AnnAssign))
            yield node.name, {s.target.id for s in annotated if isinstance(s.target, ast.Name)}


def fields_written_twice() -> list[str]:
    """Return the fields of `<Name>Options` that the class `<Name>` declares again."""
    classes: dict[str, set[str]] = {}
    for tree in trees("flowrl", "rewards").values():
        for name, names in fields(tree):
            classes[name] = classes.get(name, set()) | names
    return [
        f"{name}.{field}"
        for name, names in classes.items()
        for field in sorted(names & classes.get(f"{name}Options", set()))
    ]


def banned_names() -> Counter[str]:
    """Count the definitions (variables, parameters, functions) that bear a banned name."""
    names: Counter[str] = Counter()
    for tree in trees("flowrl", "rewards").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name.strip("_")] += 1
            elif isinstance(node, ast.arg):
                names[node.arg] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
    return Counter({name: names[name] for name in BANNED if names[name]})


def main() -> None:
    banned = banned_names()
    counts = [
        ("lines of flowrl/ and rewards/", lines("flowrl", "rewards"), 36_000),
        ("lines of tests/", lines("tests"), 26_000),
        ("commands", len(get_command(app).commands), 24),  # type: ignore[attr-defined]
        ("options", len(option_paths()), 160),
        ("fields written twice", len(fields_written_twice()), 0),
        ("definitions with a banned name", sum(banned.values()), 30),
    ]
    for name, value, goal in counts:
        print(f"{name:32}{value:>8,}   goal {goal:,}")
    if banned:
        print("banned names:", ", ".join(f"{name} {n}" for name, n in banned.most_common()))


if __name__ == "__main__":
    main()

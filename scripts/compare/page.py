"""What a page compares, as data: `pages/<name>.yaml`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from flowrl.config import Config, load_config
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError

FOLDER = Path(__file__).parent / "pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way of training: a recipe, and what it changes."""

    name: str
    recipe: str
    options: tuple[str, ...]  # KEY=VALUE
    iterations: int
    tune: Sequence[Mapping[str, Sequence[Any]]]  # grids of values tried, on validation prompts
    note: str
    steps: tuple[int, ...] = ()  # of evaluation; () for the page's
    guidance: tuple[float, ...] = ()  # at which the base is scored, too

    def choices(self) -> list[tuple[str, ...]]:
        """Return the changes of every combination of the values to try, grid by grid."""
        found: dict[tuple[str, ...], None] = {}  # a combination of two grids is tried once
        for grid in self.tune:
            keyed = [[f"{key}={_compact(v)}" for v in values] for key, values in grid.items()]
            found |= dict.fromkeys(product(*keyed))
        return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A comparison: methods, what they are measured by, and how much of it there is."""

    name: str
    title: str
    text: str  # what is compared, and what was planted
    baseline: str  # the method that others are compared with
    score: str  # measure of an image
    gold: str  # never trained on
    proxy: str  # the trained reward
    quality: str
    seeds: int
    steps: tuple[int, ...]  # of evaluation, the preset's own first
    validation: str  # prompts to tune on
    methods: tuple[Method, ...]

    def config(self, method: Method, seed: int, folder: Path, *changes: str) -> Config:
        """Return the recipe of a run. It stops by iterations, never by minutes."""
        options = [*method.options, *changes, f"run.seed={seed}", f"run.output_dir={folder}"]
        steps = f"evaluation.num_inference_steps={list(method.steps or self.steps)}"
        own = [f"run.iterations={method.iterations}", "run.trackers=[]"]
        return load_config(method.recipe, [steps, *own, *options])

    @property
    def own_steps(self) -> bool:
        """Whether methods differ in the steps that they are evaluated at first."""
        return any(method.steps for method in self.methods)

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)

    def only(self, names: Sequence[str]) -> "Page":
        """Return the page with these methods alone. Raises UserError for one it does not have."""
        known = [method.name for method in self.methods]
        if unknown := [name for name in names if name not in known]:
            raise UserError(
                f"page {self.name} has no method {unknown[0]!r}, expected one of {', '.join(known)}"
            )
        return replace(self, methods=tuple(self.method(name) for name in names))


def at_steps(page: Page, measure: str) -> dict[str, str]:
    """Return the measure at each number of steps, by its heading."""
    first, *others = page.steps
    own = "own steps" if page.own_steps else f"{first} steps"
    return {own: measure} | {f"{n} steps": f"{n}_steps/{measure}" for n in others}


def page_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_page(name: str) -> Page:
    """Return the page of this name. Raises UserError for one that is not there."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"there is no page {name!r}, expected one of {', '.join(page_names())}")
    data = load_yaml(path.read_text(encoding="utf-8"))
    common, methods = tuple(data.pop("options", ())), []
    recipe, iterations, tune = data.pop("recipe"), data.pop("iterations"), data.pop("tune", [])
    for title, own in data.pop("methods").items():
        methods.append(
            Method(
                name=title,
                recipe=own.get("recipe", recipe),
                options=(*common, *own.get("options", ())),
                iterations=own.get("iterations", iterations),
                tune=_grids(own.get("tune", tune)),
                note=own.get("note", ""),
                steps=tuple(own.get("steps", ())),
                guidance=tuple(own.get("guidance", ())),
            )
        )
    data["steps"] = tuple(data["steps"])
    return Page(name=name, methods=tuple(methods), **{"seeds": 5} | data)


def _grids(tune: Any) -> tuple[Mapping[str, Sequence[Any]], ...]:
    """Return the grids of a method: a mapping is one, an empty one none."""
    return tuple(grid for grid in (tune if isinstance(tune, list) else [tune]) if grid)


def _compact(value: Any) -> str:
    """Return a value as YAML without spaces, which separate the options of a table's line."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if " " in text:
        raise UserError(f"a value to try has a space, which tuning.csv cannot hold: {text}")
    return text

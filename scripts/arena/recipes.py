"""Write a recipe for each method of the arena, on the tiny SANA and its own prompts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from flowrl.config.load import parse_overrides
from flowrl.utils.files import write_text
from scripts.arena.methods import Arm
from scripts.arena.runs import chosen, rates

PREFIX = "method-"
SECONDS = 80.0  # of a core, in training: four times the budget of the arena
TUNED = "Its values were chosen on world 1 of the arena (gallery/arena)."
NOT_TUNED = "NOT RUN HERE: nobody has tuned its values."


def _origin(arm: Arm, values: Mapping[str, Sequence[str]]) -> str:
    """Say where an arm's values come from."""
    if arm.name not in values:
        return NOT_TUNED
    borrowed = arm.like and not arm.ranked
    return f"NOT RUN HERE: its values are those of {arm.like}." if borrowed else TUNED


def write_recipes(arms: Mapping[str, Arm], data: Path, folder: Path) -> Iterator[Path]:
    """Write `method-NAME.yaml` of each arm that needs no file of a world; yield the paths.

    data: of the ranking, with the values that were chosen, if there are any.
    """
    values, rate = chosen(arms, data), rates(data)
    for name, arm in arms.items():
        if arm.pairs or any("scripts.arena" in option for option in arm.options):
            continue
        options = [*arm.options, *values.get(name, arm.trials()[0])]
        iterations = round(SECONDS / rate[name]) if name in rate else 40
        preset = PREFIX + name.replace("_", "-")
        run = {"output_dir": f"runs/{preset}", "iterations": iterations}
        recipe = {"extends": "_methods"} | parse_overrides(options) | {"run": run}
        if "rewards" in recipe:  # a world's own measures stay with it
            recipe["rewards"] = [r for r in recipe["rewards"] if "scripts." not in r["name"]]
        head = f"# {name} on the tiny SANA. {_origin(arm, values)}"
        path = folder / f"{preset}.yaml"
        body = yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=100)
        write_text(path, f"{head}\n#\n#   flowrl train {preset}\n{body}")
        yield path

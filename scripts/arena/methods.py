"""The arms of the arena: `methods.yaml`, and the recipe of each of their runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from flowrl.config import Config, load_config
from flowrl.config.rewards import RewardOptions
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError

HERE = Path(__file__).parent
BASE, METHODS, GAMED = (HERE / f"{name}.yaml" for name in ("base", "methods", "gamed"))
TRIALS = 4  # most of an arm
# Measured at evaluations beside the base recipe's rewards; no part of what a method is.
MEASURED = ({"name": "scripts.arena.controls:Size", "held_out": True, "when": "evaluation"},)
PAIRS = "pairs"  # the folder of a world's store of right and wrong drawings


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One method."""

    name: str
    options: tuple[str, ...]  # KEY=VALUE over the base recipe
    tune: Mapping[str, Sequence[Any]]  # values tried, all combinations of them
    like: str = ""  # the arm whose values it takes; "": it has its own
    note: str = ""
    iterations: int | None = None  # None: as many as the budget allows
    pairs: bool = False  # learns from the world's pairs of drawings in place of rollouts
    ranked: bool = True  # unless it is named

    def trials(self) -> list[tuple[str, ...]]:
        """Return the changes of each trial."""
        keyed = [[_change(key, value) for value in values] for key, values in self.tune.items()]
        return list(product(*keyed))


def load_arms(path: Path = METHODS) -> dict[str, Arm]:
    """Return the arms by name. Raises UserError for one with too many trials."""
    arms = {}
    for name, own in load_yaml(path.read_text(encoding="utf-8")).items():
        options = tuple(_change(key, value) for key, value in own.get("options", {}).items())
        if trained := own.get("rewards"):  # in place of the base's, which stay measured
            used = [_reward(reward) for reward in trained]
            measured = [
                reward | {"held_out": True, "when": "evaluation"}
                for reward in _base()["rewards"]
                if _reward(reward) not in used
            ]
            options += (_change("rewards", [*trained, *measured]),)
        arm = Arm(
            name=name,
            options=options,
            tune=own.get("tune", {}),
            like=own.get("like", ""),
            note=own.get("note", ""),
            iterations=own.get("iterations"),
            pairs=own.get("pairs", False),
            ranked=own.get("ranked", True),
        )
        if len(arm.trials()) > TRIALS:
            raise UserError(f"{path.name}: {name} has more than {TRIALS} trials")
        arms[name] = arm
    return {n: replace(a, tune=arms[a.like].tune) if a.like else a for n, a in arms.items()}


def recipe(
    arm: Arm,
    world: Path,
    *,
    seed: int,
    folder: Path,
    iterations: int,
    prompts: str = "test",
    changes: Sequence[str] = (),
) -> Config:
    """Return the recipe of a run.

    Args:
        world: the folder of a planted world.
        prompts: the file of the world that is evaluated, without its ending.
        changes: chosen or tried values, KEY=VALUE.
    """
    count = len((world / f"{prompts}.jsonl").read_text(encoding="utf-8").splitlines())
    own = [
        f"pipeline.path={world / 'pipeline'}",
        f"prompts.train={world / 'train.jsonl'}",
        f"evaluation.prompts={world / f'{prompts}.jsonl'}",
        f"evaluation.num_images={count}",
        f"run.seed={seed}",
        f"run.iterations={iterations}",
        f"run.output_dir={folder}",
    ]
    if arm.pairs:
        own.append(f"rollout.store={world / PAIRS}")
    config = load_config(BASE, [*own, *arm.options, *changes])
    rewards = [*config.rewards, *map(RewardOptions.model_validate, MEASURED)]
    return config.model_copy(update={"rewards": rewards})


def _reward(reward: Mapping[str, Any]) -> tuple[str, Any]:
    return reward["name"], reward.get("args")


def _base() -> dict[str, Any]:
    return load_yaml(BASE.read_text(encoding="utf-8"))


def _change(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"{key}={text}"

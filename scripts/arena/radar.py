"""Judge the radar of `run.on_hacking` by runs on planted loopholes and by honest ones.

    python -m scripts.arena.radar --runs runs --jobs 2      train what is missing, and the page

Runs on world 1 chose the radar's tolerances; the loopholes that it is judged by, and worlds 2 to
4, were not looked at before. Gold is measured in every run and has the weight 0, so that no rule
sees it.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flowrl.utils.files import write_text
from scripts.arena.__main__ import GALLERY, _plant
from scripts.arena.methods import METHODS, Arm, load_arms, recipe
from scripts.arena.plant import world_folder
from scripts.arena.runs import FROZEN, TUNED_ON, Run, run_all
from scripts.arena.loopholes import JUDGED, TUNING
from scripts.compare.data import read_rows

WORLDS = (2, 3, 4)
HONEST = (
    "nft", "nft_on_a_tree", "dpo", "awm", "gdro", "flow_grpo_fast", "branch_grpo_mix",
    "sft_on_the_best",
)  # fmt: skip
ITERATIONS, EVERY, IMAGES = 16, 2, 200
MEASURED = [
    {"name": "tiny_judge", "held_out": True, "when": "evaluation", "weight": 0},
    {"name": "tiny_quality", "held_out": True, "when": "evaluation"},
]
HACKED_BY = {"nft": 0.0032, "grpo": 0.0016}  # the rate of each method that trains on loopholes


def runs(worlds: Path, folder: Path, *, tuning: bool, defence: str = "") -> Iterator[Run]:
    """Yield the runs on loopholes and the honest ones; on world 1 where they tune tolerances."""
    arms, frozen = load_arms(METHODS), {r["arm"]: r for r in read_rows(GALLERY / "arena" / FROZEN)}
    for world in (TUNED_ON,) if tuning else WORLDS:
        for number, loophole in enumerate(TUNING if tuning else JUDGED):
            # Half of the loopholes are found by NFT, half by GRPO.
            arm = arms["flow_grpo_fast" if number % 2 else "nft"]
            rate = 0.0016 if number % 2 else 0.0032
            rewards = [{"name": f"scripts.arena.loopholes:{loophole}"}, *MEASURED]
            yield _run(
                replace(arm, name=f"hacked {loophole}"), worlds, world, folder, rewards, defence,
                [f"optim.lr={rate}"], ITERATIONS,
            )  # fmt: skip
        for name in HONEST:
            values, count = frozen[name]["values"].split(), int(frozen[name]["iterations"])
            rewards = [
                {"name": "geneval", "args": {"mode": "partial"}},
                {"name": "geneval", "args": {"mode": "strict"}},
                *MEASURED,
            ]
            arm = replace(arms[name], name=f"honest {name}")
            yield _run(arm, worlds, world, folder, rewards, defence, values, count)


def _run(
    arm: Arm, worlds: Path, world: int, folder: Path, rewards: list[Mapping], defence: str,
    changes: list[str], iterations: int,
) -> Run:  # fmt: skip
    place = folder / f"world-{world}" / arm.name.replace(" ", "-")
    own = [
        f"rewards={json.dumps(rewards)}", f"evaluation.every={EVERY}",
        f"evaluation.num_images={IMAGES}",
    ]  # fmt: skip
    if defence:
        own.append(f"run.on_hacking={json.dumps({'action': defence, 'patience': 1})}")
    config = recipe(
        arm, world_folder(worlds, world), seed=world, folder=place, iterations=iterations,
        changes=[*changes, *own],
    )  # fmt: skip
    return Run(arm=arm.name, world=world, seed=world, options=(), config=config, folder=place)

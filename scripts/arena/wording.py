"""Other words for requests that the arena's worlds read badly (PromptRL): flow, refiner and both.

    python -m scripts.arena.wording --world 2 --world 3 --world 4

Pretraining saw "a red star and a blue ring"; here such requests are lists, "a red star, a blue
ring". Data and page go to `gallery/wording`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flowrl.api import refine
from flowrl.functional.contrasts import Interval
from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import RefinerOptions
from flowrl.prompts.templates import TemplateRefiner
from flowrl.tiny.world import PREFIXES
from flowrl.utils.files import write_text
from scripts.arena.__main__ import GALLERY, plant_world
from scripts.arena.methods import load_arms
from scripts.arena.plant import world_folder
from scripts.arena.report import by_request, crossed, interval_text
from scripts.arena.runs import Run, lean_run, run_all
from scripts.arena.together import finish, gold_of, opened, unscored
from scripts.compare.data import read_rows, write_rows

KINDS = ("two_object", "color_attr")  # whose wordings have an "and"
TRAINED = {"flow": "flow_grpo_fast", "joint": "reworded_prompts"}  # run -> arm of the arena
VALUES, REFINER = ("optim.lr=0.0032",), "prompts.refiner={own_words: 2, lr: 0.2}"
ITERATIONS, IMAGES, WORDS = 16, 200, 32  # IMAGES of a test, WORDS that the network reads
BASE, FIRST = "base", "first-try.csv"
# What is scored: name -> (run whose LoRA is used, words, what the page says).
SCORED = {
    BASE: ("", "list", "the base"),
    "untrained": ("", "drawn", "the base, rewritten by templates drawn at random"),
    "usual": ("", "usual", "the base, in the wording of pretraining: what a refiner can reach"),
    "refiner": ("", "refined", "refiner alone: the base, with the words of the run's refiner"),
    "flow": ("joint", "list", "flow alone: the run's flow, with the list's own words"),
    "joint": ("joint", "refined", "both jointly"),
    "trained alone": ("flow", "list", "a flow that was trained without a refiner"),
}  # fmt: skip
CONTRASTS = (
    ("joint", "flow"), ("joint", "refiner"), ("joint", "trained alone"), ("joint", "untrained"),
    ("refiner", "untrained"), ("refiner", "usual"),
)  # fmt: skip


def write_lists(world: Path, folder: Path) -> None:
    """Write the world's prompts of KINDS as lists, with the wording of pretraining beside them."""
    for name in ("train", "test"):
        lines = (world / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [prompt for prompt in map(json.loads, lines) if prompt["tag"] in KINDS]
        rows = {}  # by text: without their prefixes prompts repeat
        for prompt in prompts:
            prefix = next(prefix for prefix in PREFIXES if prompt["prompt"].startswith(prefix))
            usual = prompt["prompt"].removeprefix(prefix)
            rows[usual] = prompt | {"usual": usual, "prompt": usual.replace(" and ", ", ")}
        write_text(folder / f"{name}.jsonl", "\n".join(map(json.dumps, rows.values())) + "\n")


def run_of(name: str, worlds: Path, folder: Path, number: int) -> Run:
    """Return the run of the flow alone or of both, on a world."""
    place = folder / f"world-{number}"
    changes = [
        *VALUES, f"prompts.train={place / 'train.jsonl'}",
        f"evaluation.prompts={place / 'test.jsonl'}", f"evaluation.num_images={IMAGES}",
        f"pipeline.max_sequence_length={WORDS}", *([REFINER] if name == "joint" else []),
    ]  # fmt: skip
    arm = replace(load_arms()[TRAINED[name]], name=name)
    return lean_run(
        arm, worlds, number, place / name, seed=number, iterations=ITERATIONS, changes=changes
    )


def score(runs: Mapping[str, Run]) -> list[dict[str, str]]:
    """Return a row for each test image of a world with its request, and gold by those of SCORED.

    runs: the finished ones of TRAINED, the joint one among them.
    """
    golds = {}
    with opened(runs["joint"].config) as (evaluator, runtime):
        prompts = list(evaluator.prompts)
        for name, (used, words, _) in SCORED.items():
            if used and used not in runs:
                continue
            worded = _worded(prompts, words, runs["joint"])
            lora = runs[used].folder if used else None
            golds[name] = gold_of(evaluator, runtime, lora, worded)
    return [
        {"request": prompt.metadata["request"]}
        | {name: f"{gold[i]:.3g}" for name, gold in golds.items()}
        for i, prompt in enumerate(prompts)
    ]


def _worded(prompts: Sequence[PromptRecord], words: str, joint: Run) -> list[PromptRecord]:
    if words == "refined":
        return refine(joint.folder, prompts, device="cpu")
    if words == "usual":
        return [replace(prompt, wording=prompt.metadata["usual"]) for prompt in prompts]
    if words == "drawn":
        drawn = TemplateRefiner(RefinerOptions()).propose(prompts, 1, f"untrained {joint.world}")
        return [replace(p, wording=row[0].text) for p, row in zip(prompts, drawn, strict=True)]
    return list(prompts)


# --- the page ------------------------------------------------------------------------------------


def less(data: Path, name: str, other: str, files: str = "world-*.csv") -> Interval:
    """Return how much more gold one has than the other, crossed over worlds and requests."""
    tables = []
    for path in sorted(data.glob(files)):
        rows = read_rows(path)
        values = np.array([[float(row[name]) - float(row[other] if other else 0) for row in rows]])
        tables.append(by_request(values, [row["request"] for row in rows]))
    return crossed(tables)


def write_page(data: Path) -> Path:
    """Write the page from the data; return it."""
    worlds = [path.stem.removeprefix("world-") for path in sorted(data.glob("world-*.csv"))]
    lines = [
        "# In other words", "",
        f"Requests of {' and '.join(f'`{kind}`' for kind in KINDS)}, written as lists (\"a red "
        f"star, a blue ring\") on worlds {', '.join(worlds)}, whose pretraining saw \"a red star "
        f"and a blue ring\" alone. A run of {ITERATIONS} iterations trains the flow and a refiner "
        "of templates (`prompts.refiner`), which has 4 prefixes, 4 forms and 4 suffixes; one of "
        "the forms exchanges the parts and puts the \"and\" back. Gold is the share of right "
        f"images among {IMAGES} of each world's test, on the same noise. Intervals of 95 % are "
        "crossed over worlds and requests: of one run on a world. Rates were not tuned for this. "
        f"In a first try, on world 2 ([{FIRST}]({FIRST})), lists began with \"a photo of\" or "
        "another prefix of pretraining, which that form puts in the middle: the refiner gained "
        f"{interval_text(less(data, 'refiner', BASE, FIRST))} there. "
        "Made by `python -m scripts.arena.wording`.", "",
        "| scored | gold | less the base |", "|---|---|---|",
    ]  # fmt: skip
    names = set.intersection(*(set(read_rows(path)[0]) for path in data.glob("world-*.csv")))
    for name in (name for name in SCORED if name in names):
        says, gain = SCORED[name][2], "" if name == BASE else interval_text(less(data, name, BASE))
        lines.append(f"| {says} | {less(data, name, '').mean:.3f} | {gain} |")
    lines += ["", "| difference | gold |", "|---|---|"]
    lines += [
        f"| {a} less {b} | {interval_text(less(data, a, b))} |"
        for a, b in CONTRASTS
        if {a, b} <= names
    ]
    path = data / "README.md"
    write_text(path, "\n".join([*lines, ""]))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.arena.wording", description=__doc__)
    parser.add_argument("--world", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--runs", type=Path, default=Path("runs/wording"), help="folders of runs")
    options = parser.parse_args()
    data, failed = GALLERY / "wording", []
    for number in options.world:
        plant_world(number, options.worlds)
        write_lists(world_folder(options.worlds, number), options.runs / f"world-{number}")
        runs = {name: run_of(name, options.worlds, options.runs, number) for name in TRAINED}
        failed += run_all([unscored(run) for run in runs.values()], at_once=1)
        finished = {name: run for name, run in runs.items() if run.finished}
        if "joint" in finished:
            write_rows(data / f"world-{number}.csv", score(finished))
    finish(write_page, data, failed)


if __name__ == "__main__":
    main()

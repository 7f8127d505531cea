"""What `flowrl sample --best-of N` gains on the arena's worlds, without training.

    python -m scripts.arena.best_of --world 2 --world 3 --world 4

Draws IMAGES images of each test request of the base, scores all, and keeps of each block of N the
one that a reward scores best. Data and page go to `gallery/best-of`.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from flowrl.assembly.learner import build_rewards
from flowrl.assembly.start import runtime_to_evaluate
from flowrl.evaluation.loading import held_out_prompts, load_evaluator
from flowrl.scoring.spec import closing
from flowrl.training.evaluate import Evaluation
from flowrl.utils.files import write_text
from scripts.arena.__main__ import GALLERY, plant_world
from scripts.arena.methods import Arm, recipe
from scripts.arena.plant import world_folder
from scripts.arena.report import crossed, interval_text
from scripts.arena.runs import GOLD
from scripts.compare.data import read_rows, write_rows

IMAGES, COUNTS = 8, (1, 2, 4, 8)
PROXY, NEAR = "tiny_proxy", "near.csv"  # the reward and the data of a search near the best noise
SELECTORS = ("geneval_strict", "tiny_proxy", "tiny_quality")
REWARDS = [
    {"name": "geneval", "args": {"mode": "strict"}},
    *({"name": name, "held_out": True} for name in ("tiny_proxy", "tiny_quality", GOLD)),
]


def score_images(world: Path) -> Evaluation:
    """Score IMAGES images of each request of a planted world, drawn by its base."""
    arm = Arm(name="base", options=(), tune={})
    count = IMAGES * len((world / "test.jsonl").read_text(encoding="utf-8").splitlines())
    changes = [f"evaluation.num_images={count}", f"rewards={json.dumps(REWARDS)}"]
    config = recipe(
        arm, world, seed=0, folder=world / "unused", iterations=1, changes=changes
    )  # fmt: skip
    config = config.model_copy(update={"rewards": config.rewards[: len(REWARDS)]})
    runtime = runtime_to_evaluate(config)
    specs = build_rewards(config, gpu=runtime.gpu)
    with closing(specs):
        evaluator, _ = load_evaluator(config, runtime, specs, held_out_prompts(config, specs), [])
        return evaluator(evaluator.backbone.velocity, runtime)


def write_scores(evaluation: Evaluation, path: Path) -> None:
    """Write a row for each image: its request's number, and its scores."""
    measures = evaluation.measures()
    rows = [
        {"request": prompt, **{name: f"{measures[name][i]:.4g}" for name in (*SELECTORS, GOLD)}}
        for i, prompt in enumerate(evaluation.prompt.tolist())
    ]
    write_rows(path, rows)


def gold_of_best(path: Path, selector: str, count: int) -> np.ndarray:
    """Return the gold score of the best of `count` images, (blocks, requests).

    The images of a request are cut into blocks of `count`. Of equal scores the first one is best.
    """
    rows = read_rows(path)
    requests = np.array([int(row["request"]) for row in rows])
    gold, scores = (np.array([float(row[name]) for row in rows]) for name in (GOLD, selector))
    columns = []
    for request in np.unique(requests):
        blocks = np.flatnonzero(requests == request)[:IMAGES].reshape(-1, count)
        best = np.nan_to_num(scores[blocks], nan=-np.inf).argmax(1)
        columns.append(gold[blocks[np.arange(len(blocks)), best]])
    return np.stack(columns, 1)


def search_lines(path: Path) -> list[str]:
    """Return the page's part on the search near the best noise so far."""
    rows = read_rows(path)
    cells = []
    for name in (PROXY, GOLD):
        tables = []
        for world in sorted({row["world"] for row in rows}):
            gains = [float(r[f"near {name}"]) - float(r[f"apart {name}"]) for r in rows
                     if r["world"] == world]  # fmt: skip
            tables.append((np.array([gains]), np.ones((1, len(gains)))))
        cells.append(f"`{name}` {interval_text(crossed(tables))}")
    return [
        "", "## Near the best noise so far", "",
        f"A local search ([2501.09732](https://arxiv.org/abs/2501.09732)) of {IMAGES} images: half",
        "of them have their own noises z, each other one begins with sqrt(1 - s^2) z + s z' of the",
        f"best so far, s = {rows[0]['share']}, chosen among 0.3 and 0.6 on world 1. By `{PROXY}`,",
        f"less the best of {IMAGES} independent ones, on {len(rows)} requests:",
        f"{', '.join(cells)}. It did worse, and there is no option for it any more.",
    ]  # fmt: skip


def write_page(data: Path) -> Path:
    """Write the page from the data; return it."""
    paths = sorted(data.glob("world-*.csv"))
    lines = [
        "# Best of N without training", "",
        "`flowrl sample --best-of N --reward R` on the untrained pipelines of worlds "
        f"{', '.join(path.stem.removeprefix('world-') for path in paths)}: mean gold score of the "
        f"image that each reward scores best, over all blocks of N of a request's {IMAGES}, less "
        "the mean of all of them. "
        "Intervals are crossed over worlds, blocks of N images and requests. A choice costs N "
        "times the denoising steps at every use; training costs once, see [the arena]"
        "(../arena/README.md). Made by `python -m scripts.arena.best_of`.", "",
        f"| N | {' | '.join(f'`{name}`' for name in SELECTORS)} |", "|---" * 4 + "|",
    ]  # fmt: skip
    for count in COUNTS[1:]:
        cells = []
        for selector in SELECTORS:
            tables = []
            for path in paths:
                one = gold_of_best(path, selector, 1).mean(0)
                gains = gold_of_best(path, selector, count) - one
                tables.append((gains, np.ones_like(gains)))
            cells.append(interval_text(crossed(tables)))
        lines.append(f"| {count} | {' | '.join(cells)} |")
    if (data / NEAR).is_file():
        lines += search_lines(data / NEAR)
    path = data / "README.md"
    write_text(path, "\n".join([*lines, ""]))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.arena.best_of", description=__doc__)
    parser.add_argument("--world", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--output", type=Path, default=GALLERY, help="folder of pages")
    options = parser.parse_args()
    data = options.output / "best-of"
    for number in options.world:
        plant_world(number, options.worlds)
        scores = score_images(world_folder(options.worlds, number))
        write_scores(scores, data / f"world-{number}.csv")
    print(write_page(data))


if __name__ == "__main__":
    main()

"""What `flowrl sample --best-of N` gains on the arena's worlds, without training.

    python -m scripts.arena.best_of --world 2 --world 3 --world 4
    python -m scripts.arena.best_of --near --world 1 --world 2 --world 3 --world 4

Draws IMAGES images of each test request of the base, scores all, and keeps of each block of N the
one that a reward scores best. With `--near` as many images are searched for the best, the later
half near the best noise so far. Data and page go to `gallery/best-of`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from flowrl.api import named_rewards, sample
from flowrl.assembly.learner import build_rewards
from flowrl.assembly.start import runtime_to_evaluate
from flowrl.evaluation.drawing import Drawing
from flowrl.evaluation.loading import held_out_prompts, load_evaluator
from flowrl.prompts.records import load_prompts
from flowrl.scoring.files import best_image
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
# Of the search near the best noise: its reward, shares of new noise that are tried, and requests.
PROXY, SHARES, SEARCHED, NEAR = "tiny_proxy", (0.3, 0.6), 100, "near.csv"
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


def search(world: Path, prompts: str, share: float | None) -> list[dict[str, float]]:
    """Return the scores of each request's best of IMAGES images; share: of `sample(near=...)`."""
    records = load_prompts(str(world / f"{prompts}.jsonl"))[:SEARCHED]
    drawing = Drawing(
        str(world / "pipeline"), guidance=1.0, steps=8, max_sequence_length=12, device="cpu"
    )
    proxy, gold = named_rewards([PROXY, GOLD])
    with closing([proxy, gold]), TemporaryDirectory() as folder:
        images = sample(
            drawing, records, seed=0, count=1, output_dir=Path(folder), best_of=IMAGES,
            reward=proxy, near=share,
        )  # fmt: skip
        return [
            {PROXY: score, GOLD: best_image(gold, [Image.open(path)], record)[1]}
            for record, (path, score) in zip(records, images.items(), strict=True)
        ]


def write_search(worlds: Path, numbers: Sequence[int], path: Path) -> None:
    """Write a row for each request: its scores by independent seeds and by the search.

    The share is chosen on validation requests of the first world, which is not in the table.
    """
    first, *tested = (world_folder(worlds, number) for number in numbers)
    tried = {share: search(first, "validation", share) for share in SHARES}
    best = max(SHARES, key=lambda share: sum(row[PROXY] for row in tried[share]))
    rows = []
    for number, world in zip(numbers[1:], tested, strict=True):
        pairs = zip(search(world, "test", None), search(world, "test", best), strict=True)
        for request, (apart, near) in enumerate(pairs):
            scores = {f"apart {n}": v for n, v in apart.items()}
            scores |= {f"near {n}": v for n, v in near.items()}
            row = {"world": number, "request": request, "share": best}
            rows.append(row | {name: f"{value:.4g}" for name, value in scores.items()})
    write_rows(path, rows)


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
    share, tried = rows[0]["share"], " and ".join(map(str, SHARES))
    paper = "[2501.09732](https://arxiv.org/abs/2501.09732)"
    return [
        "", "## Near the best noise so far", "",
        f"`--near {share}`: of {IMAGES} images the first half has its own noises, each other one",
        f"begins near the best so far ({paper}). Chosen by `{PROXY}`, less the best of {IMAGES}",
        f"independent ones, on the first {SEARCHED} requests of a world: {', '.join(cells)}. The",
        f"share was chosen among {tried} by the same reward on validation requests of world 1.",
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
    parser.add_argument("--near", action="store_true", help="search near the best noise, too")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--output", type=Path, default=GALLERY, help="folder of pages")
    options = parser.parse_args()
    data = options.output / "best-of"
    for number in options.world:
        plant_world(number, options.worlds)
    if options.near:
        if len(options.world) < 2:
            parser.error("--near needs a world to choose the share on, and others")
        write_search(options.worlds, options.world, data / NEAR)
    else:
        for number in options.world:
            scores = score_images(world_folder(options.worlds, number))
            write_scores(scores, data / f"world-{number}.csv")
    print(write_page(data))


if __name__ == "__main__":
    main()

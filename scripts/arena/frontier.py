"""Gold against diversity on the arena's worlds: SGRPO's supergroups, and credit image by image.

    python -m scripts.arena.frontier --spreads                           on world 1
    python -m scripts.arena.frontier --world 2 --world 3 --world 4

Every arm is GRPO with SGRPO's rate and noise of the arena, and `advantage.scale: none`. Arms differ
in `diversity`: in four sets of a prompt's images, image by image, or none, at weights that give it
SHARES of the spread that the other rewards have in a group of the base. Data and page go to
`gallery/frontier`.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flowrl_rewards.diversity import SetDiversity

from flowrl.functional.contrasts import Interval
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.plots import LINES, SOFT, new_figure, png_bytes, style_axes
from scripts.arena.__main__ import GALLERY, plant_world
from scripts.arena.methods import Arm, load_arms
from scripts.arena.report import by_request, crossed, resampled
from scripts.arena.runs import GOLD, REWARDS, TUNED_ON, Run, evaluated_prompts, lean_run, run_all
from scripts.arena.together import finish, opened
from scripts.compare.data import read_rows, write_rows

SETS_ARM, CONTROL, NONE = "sgrpo", "image by image", "none 0"
SETS = {SETS_ARM: 4, CONTROL: 1}  # of a prompt's images
SHARES = (0.1, 0.3, 1.0)
VALUES = ("optim.lr=0.0032", "rollout.noise_level=0.7")  # of SGRPO, tuned on world 1
ITERATIONS, IMAGES, GROUP, GROUPS = 24, 3, 16, 48  # IMAGES of each test prompt
SPREADS = "spreads.csv"


def write_spreads(worlds: Path, path: Path) -> None:
    """Write the spread in a group of the base's images on world 1, of rewards and of diversity."""
    config = lean_run(
        Arm(name="base", options=(), tune={}), worlds, TUNED_ON, worlds / "unused", seed=0,
        iterations=1, prompts="validation", rewards=REWARDS[:2],
    ).config  # fmt: skip
    with opened(config) as (evaluator, runtime):
        # One prompt's images one after the other.
        every = [prompt for prompt in evaluator.prompts[:GROUPS] for _ in range(GROUP)]
        evaluator = replace(evaluator, prompts=every, keep=len(every))
        seen = evaluator(evaluator.backbone.velocity, runtime)
    groups = (seen.images.float() / 255).split(GROUP)
    spreads = {"geneval": seen.scores.sum(1).view(GROUPS, GROUP).std(1, correction=0)}
    for arm, sets in SETS.items():
        credit = [SetDiversity(sets)(images, [""] * GROUP, [{}] * GROUP)[0] for images in groups]
        spreads[arm] = torch.stack(credit).std(1, correction=0)
    write_rows(path, [{"of": n, "spread": f"{s.mean().item():.5f}"} for n, s in spreads.items()])


def runs(worlds: Path, folder: Path, data: Path, numbers: Sequence[int], seeds: int) -> list[Run]:
    """Return the runs of all arms, seed by seed."""
    spread = {row["of"]: float(row["spread"]) for row in read_rows(data / SPREADS)}
    arms: dict[str, list[Mapping[str, Any]]] = {NONE: []}
    for share in SHARES:
        for name, sets in SETS.items():
            weight = float(f"{share * spread['geneval'] / spread[name]:.3g}")
            reward = {"name": "diversity", "args": {"sets": sets}, "weight": weight}
            arms[f"{name} {share:g}"] = [reward]
    sgrpo = load_arms()["sgrpo"]
    return [
        lean_run(
            replace(sgrpo, name=name), worlds, number,
            folder / f"world-{number}" / f"{name}-{seed}".replace(" ", "-").replace(".", "_"),
            seed=seed, iterations=ITERATIONS, images=IMAGES,
            rewards=[*REWARDS[:2], *diversity, *REWARDS[2:]], changes=VALUES,
        )
        for seed in range(seeds)
        for name, diversity in arms.items()
        for number in numbers
    ]  # fmt: skip


def rows_of(arm: str, run: Run, iteration: int) -> list[dict[str, Any]]:
    """Return a row for each test prompt: gold, and the mean difference of two of its images.

    The difference is that of `diversity`, on thumbnails of 8 by 8 cells; of right images as well,
    empty where fewer than two are right.
    """
    seen, requests = run.evaluation(iteration), [p["request"] for p in evaluated_prompts(run)]
    numbers = {request: i for i, request in enumerate(dict.fromkeys(requests))}
    gold, cells, rows = seen.measures()[GOLD], seen.thumbnails.double().flatten(1), []
    for number in seen.prompt.unique():
        here = torch.nonzero(seen.prompt == number).flatten()
        right = here[gold[here] > 0.5]
        rows.append({
            "arm": arm, "seed": run.seed, "request": numbers[requests[int(here[0])]],
            "gold": f"{gold[here].mean().item():.4g}",
            "diversity": _difference(cells[here]), "right": _difference(cells[right]),
        })  # fmt: skip
    return rows


def _difference(cells: torch.Tensor) -> str:
    """Return the mean difference of two of the rows (K, cells); "" of fewer than two."""
    count = len(cells)
    total = (cells[:, None] - cells).abs().mean(-1).sum().item()
    return f"{total / (count * (count - 1)):.4f}" if count > 1 else ""


# --- the page ------------------------------------------------------------------------------------

Tables = Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]]  # by arm and world


def tables_of(data: Path, measure: str) -> Tables:
    """Return a measure's sums and counts of all arms, (runs, requests) each, by world."""
    tables: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    for path in sorted(data.glob("world-*.csv")):
        seeds: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
        for row in read_rows(path):
            seeds[row["arm"]][row["seed"]].append(row)
        for arm, runs in seeds.items():
            values = [[float(row[measure] or "nan") for row in rows] for rows in runs.values()]
            requests = [row["request"] for row in next(iter(runs.values()))]
            world = int(path.stem.removeprefix("world-"))
            tables[arm][world] = by_request(np.array(values), requests)
    return tables


def drawn(tables: Tables, arms: Sequence[str]) -> np.ndarray:
    """Return the arms' means, and these resampled, on the worlds that have all of them.

    (1 + RESAMPLES, arms). All arms are drawn with the same worlds and requests.
    """
    worlds = set.intersection(*(set(tables[arm]) for arm in arms))
    shared = [[tables[arm][world] for world in sorted(worlds)] for arm in arms]
    return np.stack([np.r_[crossed(some).mean, resampled(some)] for some in shared], -1)


def interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Interval(mean=float(values[0]), low=float(low), high=float(high))


def less(tables: Tables, arm: str, other: str) -> Interval:
    """Return how much more an arm has than another."""
    return interval(-np.diff(drawn(tables, [arm, other]))[:, 0])


def above(gold: Tables, diversity: Tables, arm: str) -> Interval:
    """Return how far an arm's gold is above the control's frontier, at the arm's diversity.

    The frontier joins the control's points and that without diversity; beyond its ends it goes on
    level. It is drawn anew in each resample.
    """
    arms = [arm, NONE, *(name for name in gold if name.startswith(CONTROL))]
    y, x = (drawn(tables, arms) for tables in (gold, diversity))
    order = np.argsort(x[:, 1:], -1)
    xs, ys = (np.take_along_axis(values[:, 1:], order, -1) for values in (x, y))
    at = [np.interp(*point) for point in zip(x[:, 0], xs, ys, strict=True)]
    return interval(y[:, 0] - at)


def write_page(data: Path) -> Path:
    """Write the page and its chart from the data; return the page."""
    gold, diversity, right = (tables_of(data, name) for name in ("gold", "diversity", "right"))
    arms = [arm for arm in gold if arm not in ("base", NONE)]
    lines = [
        "# Gold against diversity", "",
        f"SGRPO compares four sets of a prompt's images in `diversity` (`{SETS_ARM}`); the control "
        f"gives each image its own credit (`{CONTROL}`). On worlds {_names(gold[NONE])}, "
        f"one run of an arm on each, {ITERATIONS} iterations of GRPO with SGRPO's rate and noise "
        "(tuned on world 1) and `advantage.scale: none`. The number behind an arm is the share of "
        "its diversity's spread in a group of the base's images by the other rewards' "
        f"([{SPREADS}]({SPREADS}), from world 1). Gold is the share of right images; diversity the "
        f"mean difference of two of {IMAGES} images of a test prompt, as the reward has it, on "
        "thumbnails of 8 by 8 cells. A wrong image adds to it, so that the last column has pairs "
        "of right images alone, without an interval where a world has too few. Intervals of 95 % "
        "are crossed over worlds, runs and requests. Made "
        "by `python -m scripts.arena.frontier`.", "",
        "![gold against diversity](frontier.png)", "",
        "| arm | worlds | gold | diversity | of right images |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for arm in ("base", NONE, *arms):
        measures = (interval(drawn(t, [arm])[:, 0]) for t in (gold, diversity, right))
        lines.append(f"| {arm} | {_names(gold[arm])} | {' | '.join(map(text, measures))} |")
    lines += [
        "", "Against the arm without diversity, and against the control's frontier: the line "
        "through the control's arms and the arm without diversity, at the arm's own diversity. On "
        "the worlds that have all the arms in question.", "",
        "| arm | gold | diversity | of right images | gold above the control's frontier |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for arm in arms:
        cells = [text(less(t, arm, NONE), "+") for t in (gold, diversity, right)]
        cells.append(text(above(gold, diversity, arm), "+") if arm.startswith(SETS_ARM) else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    write_bytes(data / "frontier.png", _chart(gold, diversity))
    path = data / "README.md"
    write_text(path, "\n".join([*lines, ""]))
    return path


def _names(worlds: Iterable[int]) -> str:
    return ", ".join(map(str, worlds))


def text(found: Interval, sign: str = "") -> str:
    limits = "" if np.isnan(found.low) else f" [{found.low:.4f}, {found.high:.4f}]"
    return f"{found.mean:{sign}.4f}{limits}"


def _chart(gold: Tables, diversity: Tables) -> bytes:
    """Draw gold against diversity of the base, and along the weights of both kinds."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    style_axes(axes, title="gold against diversity", x_label="diversity", y_label="gold")
    kinds = {"base": ["base"]} | {
        kind: [NONE, *(arm for arm in gold if arm.startswith(kind))]
        for kind in (SETS_ARM, CONTROL)
    }  # fmt: skip
    for (kind, arms), color in zip(kinds.items(), (SOFT, *LINES), strict=False):
        found = [[interval(drawn(t, [arm])[:, 0]) for arm in arms] for t in (diversity, gold)]
        x, y = ([one.mean for one in some] for some in found)
        ends = [
            np.array([[one.mean - one.low, one.high - one.mean] for one in some]).T
            for some in found
        ]
        axes.errorbar(
            x, y, xerr=ends[0], yerr=ends[1], fmt="o-", color=color, markersize=4, linewidth=1,
            elinewidth=0.6, label=kind,
        )  # fmt: skip
        for arm, at in zip(arms, zip(x, y, strict=True), strict=True):
            axes.annotate(arm.rsplit(" ", 1)[-1] if " " in arm else "", at, color=color)
    axes.legend(frameon=False)
    return png_bytes(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.arena.frontier", description=__doc__)
    parser.add_argument("--world", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--spreads", action="store_true", help="measure what the weights are from")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each arm on a world")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="folders of runs")
    options = parser.parse_args()
    data = GALLERY / "frontier"
    for number in (TUNED_ON, *options.world) if options.spreads else options.world:
        plant_world(number, options.worlds)
    if options.spreads:
        write_spreads(options.worlds, data / SPREADS)
    each = runs(options.worlds, options.runs, data, options.world, options.seeds)
    failed = run_all(each, at_once=1)
    for number in options.world:
        here = [run for run in each if run.world == number and run.finished]
        rows = rows_of("base", here[0], 0)
        rows += [row for run in here for row in rows_of(run.arm, run, ITERATIONS)]
        write_rows(data / f"world-{number}.csv", rows)
    finish(write_page, data, failed)


if __name__ == "__main__":
    main()

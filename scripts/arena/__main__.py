"""Rank methods on worlds that nobody tuned on.

    python -m scripts.arena --tune --jobs 2                 try each method's values on world 1
    python -m scripts.arena --world 2 --world 3 --world 4 --seeds 3 --jobs 2
    python -m scripts.arena --world 17 --methods nft --methods dpo --output build/pages
    python -m scripts.arena --gamed --world 2 --seeds 5     methods on rewards with a loophole
    python -m scripts.arena                                 render the page from its data
    python -m scripts.arena --recipes                       write a recipe for each method

Worlds 1 to 4 come with the clone; any other is planted, which takes a quarter of an hour to half an
hour of a core. Runs whose data the output has are skipped, and what was stopped resumes. Every
method has the same budget of core seconds; recipes and chosen values are frozen by the first
ranking. An output without rates and trials takes those of the gallery.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flowrl.errors import UserError
from scripts.arena.chooser import write_chooser
from scripts.arena.gamed import collect_curves, render_gamed
from scripts.arena.methods import GAMED, METHODS, PAIRS, Arm, load_arms
from scripts.arena.plant import (
    pipeline_of,
    plant,
    planted_weights,
    save_pipeline,
    world_folder,
    write_pairs,
    write_prompts,
)
from scripts.arena.recipes import write_recipes
from scripts.arena.report import render
from scripts.arena.runs import (
    RATES,
    RUNS,
    TUNED_ON,
    TUNING,
    collect,
    measure_rates,
    ranking,
    run_all,
    score_worlds,
    tune,
)
from scripts.arena.world import world

GALLERY = Path("gallery")


def main() -> None:
    options = _parser().parse_args()
    arms = _chosen(load_arms(GAMED if options.gamed else METHODS), options.methods)
    part = "gamed" if options.gamed else "arena"
    folder, data = options.runs / part, options.output / part
    for number in (TUNED_ON, *options.world) if options.tune else options.world:
        plant_world(number, options.worlds)
    if options.recipes:
        for path in write_recipes(load_arms(METHODS), options.output / "arena", options.recipes):
            print(path)
        return
    failed = []
    if options.tune:
        measure_rates(arms, options.worlds, folder, data)
        failed = tune(arms, options.worlds, folder, data, options.budget, at_once=options.jobs)
    if options.world:
        failed += _rank(options, arms, folder, data)
    if (data / RUNS).is_file():
        print(render_gamed(data) if options.gamed else render(data))
        if data == GALLERY / "arena":
            print(write_chooser(data, GALLERY / "gamed", Path("docs/objectives.md")))
    if failed:
        raise SystemExit(f"{len(failed)} runs did not finish: {', '.join(failed)}")


def _rank(
    options: argparse.Namespace, arms: Mapping[str, Arm], folder: Path, data: Path
) -> list[str]:
    """Run what is missing of a ranking, and write its data; return the folders of failed runs."""
    for name in (RATES, TUNING):
        shared = GALLERY / data.name / name
        if shared.is_file() and not (data / name).is_file():
            data.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(shared, data / name)
    runs = ranking(
        arms,
        options.worlds,
        folder,
        data,
        options.budget,
        numbers=options.world,
        seeds=options.seeds,
    )
    failed = run_all(runs, at_once=options.jobs)
    collect(runs, data)
    if options.gamed:
        collect_curves(runs, data)
    else:
        score_worlds(options.worlds, options.world, data)
    return failed


def _chosen(arms: Mapping[str, Arm], names: Sequence[str]) -> dict[str, Arm]:
    """Return the arms of these names; without any, or with "all", those that are ranked."""
    if not names or "all" in names:
        return {n: arm for n, arm in arms.items() if arm.ranked}
    if unknown := [name for name in names if name not in arms]:
        raise UserError(f"no method {unknown[0]!r}: expected some of {', '.join(arms)}")
    return {n: arm for n, arm in arms.items() if n in names}


def plant_world(number: int, worlds: Path) -> None:
    folder = world_folder(worlds, number)
    if not (folder / "pipeline").is_dir() and planted_weights(number).is_file():
        save_pipeline(pipeline_of(planted_weights(number)), folder)
    if not (folder / "pipeline").is_dir():
        print(f"planting world {number}", flush=True)
        torch.set_num_threads(1)
        plant(world(number), folder, threads=1)
    write_prompts(world(number), folder)
    if not (folder / PAIRS).is_dir():
        write_pairs(world(number), folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.arena", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--world", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--methods", action="append", default=[], help="in place of all ranked")
    parser.add_argument("--tune", action="store_true", help="try values on world 1's validation")
    parser.add_argument("--gamed", action="store_true", help="the list of `gamed.yaml` instead")
    parser.add_argument(
        "--recipes", type=Path, nargs="?", const=Path("configs"), help="write them to a folder"
    )
    parser.add_argument("--budget", type=float, default=20.0, help="core seconds of training")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method on a world")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folders of runs")
    parser.add_argument("--output", type=Path, default=GALLERY, help="folder of pages")
    return parser


if __name__ == "__main__":
    main()

"""Run arms within a budget of core seconds: rates, trials on world 1, runs on other worlds.

Their data lie beside the page: `rates.csv` (core seconds of an iteration), `tuning.csv` (what each
trial scored), `worlds.csv` (base and ceiling), `runs.csv` (a row for each run) and `world-N.csv`
(the gold score of each image of a test, a column for each run).
"""

import hashlib
import json
import multiprocessing
import os
import resource
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.api import evaluate
from flowrl.assembly.learner import ProvidedObjects, evaluation_prompts
from flowrl.cli import main
from flowrl.config import Config, config_yaml
from flowrl.errors import UserError
from flowrl.prompts.records import PromptSampler
from flowrl.training.evaluate import Evaluation, evaluation_file
from flowrl.training.ledger import Ledger
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_text
from scripts.arena.methods import BASE, Arm, recipe
from scripts.arena.plant import CLEAN, pipeline_of, world_folder
from scripts.compare.data import read_rows, write_rows
from scripts.compare.law import FREEDOM, LAYOUT, variety
from scripts.pretrain_tiny.families import save_half

RATES, TUNING, WORLDS, RUNS, FROZEN = (
    "rates.csv", "tuning.csv", "worlds.csv", "runs.csv", "frozen.csv",
)  # fmt: skip
GOLD = "tiny_judge"
# Rewards of the runs of `lean_run`: those of the base recipe, and the judge.
REWARDS = (
    {"name": "geneval", "args": {"mode": "partial"}},
    {"name": "geneval", "args": {"mode": "strict"}},
    {"name": GOLD, "held_out": True, "when": "evaluation"},
)
TUNED_ON = 1  # the world whose validation requests decide
TUNING_SEED = 1000
# Endings of files beside a run's folder with its core seconds and peak memory in MiB, a line for
# each start.
SECONDS, PEAK = ".seconds", ".peak"
RATED, ROUNDS = 8, 3  # iterations of the runs that an arm's rate is from, and their number
# Runs are forked from a process that has imported everything, which takes 12 s of a core each.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["scripts.arena.runs", "flowrl.planning.machine"])
PLACES = ("split", "family", "tag", "tier", "request")  # what a test's table says of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of `flowrl train` in a process of its own, with one thread."""

    arm: str
    world: int
    seed: int
    options: tuple[str, ...]  # chosen or tried values
    config: Config
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether the run has ended: after its iterations, or by run.on_hacking."""
        return self.end is not None

    @property
    def end(self) -> int | None:
        """The iteration with which the run ended; None where it has not."""
        stop = Ledger(self.folder).last("start", "resume", "stop")
        return stop["step"] if stop and stop.get("complete") else None

    def train(self) -> bool:
        """Train what is missing, and append its core seconds to a file beside the run's folder.

        Raises UserError where the folder holds a run of another recipe.
        """
        path, recipe = self.folder.with_suffix(".yaml"), config_yaml(self.config)
        if path.is_file() and path.read_text(encoding="utf-8") != recipe:
            raise UserError(
                f"{self.folder} holds a run of another recipe: remove it, or give another --runs"
            )
        if self.finished:
            return True
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, recipe)
        process = SERVER.Process(target=_train, args=(path, self.folder))
        process.start()
        process.join()
        return self.finished

    def core_seconds(self) -> float:
        """Return the processor's seconds of all its processes, start and evaluation included."""
        return sum(map(float, self.folder.with_suffix(SECONDS).read_text().split()))

    def resources(self) -> dict[str, str]:
        """Return its core seconds and its most memory in MiB, shared imports included.

        Nothing for a run of another machine, which left no files beside its folder.
        """
        if not self.folder.with_suffix(SECONDS).is_file():
            return {"core_seconds": "", "peak_mib": ""}
        peaks = map(int, self.folder.with_suffix(PEAK).read_text().split())
        return {"core_seconds": f"{self.core_seconds():.1f}", "peak_mib": f"{max(peaks)}"}

    def total(self, *names: str) -> float:
        """Return the sum of these metrics over all iterations."""
        return sum(row.get(name) or 0.0 for row in read_metrics(self.folder) for name in names)

    def iteration_seconds(self) -> float:
        """Return the median over iterations of their seconds, which are a core's: of one thread."""
        laps = [
            sum(row[name] for name in row if name.startswith("time/") and name.count("/") == 1)
            for row in read_metrics(self.folder)
            if "time/train" in row
        ]
        return statistics.median(laps)

    def scored_images(self) -> float:
        """Return how many images got rewards in training, candidates included; none of a store."""
        if self.config.rollout.store:
            return 0.0
        return self.total("explore/candidates", "tree/leaves")

    def evaluation(self, iteration: int) -> Evaluation:
        return Evaluation.load(evaluation_file(self.folder, iteration))


def _train(recipe: Path, folder: Path) -> None:
    """Run `flowrl train` in this process, and append its core seconds beside the run's folder."""
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        main(["train", str(recipe)])
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with folder.with_suffix(SECONDS).open("a") as file:
            file.write(f"{used.ru_utime + used.ru_stime:.1f}\n")
        with folder.with_suffix(PEAK).open("a") as file:
            file.write(f"{used.ru_maxrss / 1024:.0f}\n")  # of KiB


def run_all(runs: Sequence[Run], *, at_once: int) -> list[str]:
    """Train what is not finished, so many at once; return the folders of runs that failed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    waiting = [run for run in runs if not run.finished]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished", flush=True)

    def train(run: Run) -> str | None:
        if run.train():
            print(f"{run.folder}: {run.core_seconds():.0f} core seconds", flush=True)
            return None
        print(f"{run.folder} did not finish, see its .log; the same command resumes", flush=True)
        return str(run.folder)

    with ThreadPoolExecutor(at_once) as pool:
        return [failed for failed in pool.map(train, waiting) if failed]


# --- rates and trials ----------------------------------------------------------------------------


def measure_rates(arms: Mapping[str, Arm], worlds: Path, folder: Path, data: Path) -> None:
    """Measure the core seconds of an iteration of each arm that has none in `rates.csv`.

    One run at a time, in rounds over all arms, so that what slows the machine for a while slows no
    arm in all its runs; the rate is the least of the rounds' medians.
    """
    rows: list[dict[str, Any]] = list(read_rows(data / RATES))
    done = {row["arm"] for row in rows}
    runs = [
        _run(
            arm, worlds, TUNED_ON, folder / "rates" / f"{name}-round-{turn}", seed=TUNING_SEED,
            options=arm.trials()[0],
            iterations=RATED, prompts="validation", changes=["evaluation.prompts=null"],
        )
        for turn in range(ROUNDS)
        for name, arm in arms.items()
        if name not in done
    ]  # fmt: skip
    run_all(runs, at_once=1)
    for name in arms:
        medians = [run.iteration_seconds() for run in runs if run.arm == name and run.finished]
        if medians:
            rows.append({"arm": name, "core_seconds": f"{min(medians):.3f}"})
    if rows:
        write_rows(data / RATES, rows)


def rates(data: Path) -> dict[str, float]:
    """Return the core seconds of an iteration by arm."""
    return {row["arm"]: float(row["core_seconds"]) for row in read_rows(data / RATES)}


def tune(
    arms: Mapping[str, Arm], worlds: Path, folder: Path, data: Path, budget: float, *, at_once: int
) -> list[str]:
    """Try all values on the validation requests of world 1; return the runs that failed."""
    rate = rates(data)
    runs = [
        _run(
            arm, worlds, TUNED_ON, folder / "tuning" / f"{name}-{number}", seed=TUNING_SEED,
            options=trial, iterations=max(1, round(budget / rate[name])), prompts="validation",
        )
        for name, arm in arms.items()
        for number, trial in enumerate(() if arm.like else arm.trials())
    ]  # fmt: skip
    failed = run_all(runs, at_once=at_once)
    rows = [
        {
            "arm": run.arm,
            "options": " ".join(run.options),
            "base": f"{_gold(run, 0):.4f}",
            "score": f"{_gold(run, run.end):.4f}",
        }
        for run in runs
        if run.finished
    ]
    kept = [row for row in read_rows(data / TUNING) if row["arm"] not in arms]
    if rows:
        write_rows(data / TUNING, [*kept, *rows])
    return failed


def chosen(arms: Mapping[str, Arm], data: Path) -> dict[str, tuple[str, ...]]:
    """Return the values of each arm that scored best."""
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for row in read_rows(data / TUNING):
        found = float(row["score"]), tuple(row["options"].split())
        best[row["arm"]] = max(best.get(row["arm"], found), found, key=lambda pair: pair[0])
    own = {name: options for name, (_, options) in best.items()}
    own |= {name: () for name, arm in arms.items() if not arm.tune and not arm.like}
    return {name: own[arm.like or name] for name, arm in arms.items() if (arm.like or name) in own}


def frozen_methods(arms: Mapping[str, Arm], data: Path, budget: float) -> dict[str, dict[str, str]]:
    """Return what is frozen of each arm before another world is seen, as rows of `frozen.csv`.

    Its iterations, its chosen values, and the digest of these, its options and the base recipe.
    """
    rate, values, base = rates(data), chosen(arms, data), BASE.read_bytes()
    rows = {}
    for name, arm in arms.items():
        if name not in values or not (arm.iterations or name in rate):
            raise UserError(f"{name} was not tuned, {data} has no values of it: give --tune")
        row = {
            "arm": name,
            "iterations": str(arm.iterations or max(1, round(budget / rate[name]))),
            "values": " ".join(values[name]),
        }
        content = base + "\n".join([*row.values(), *arm.options]).encode()
        rows[name] = row | {"digest": hashlib.sha256(content).hexdigest()}
    return rows


# --- ranking -------------------------------------------------------------------------------------


def ranking(
    arms: Mapping[str, Arm], worlds: Path, folder: Path, data: Path, budget: float,
    *, numbers: Sequence[int], seeds: int,
) -> list[Run]:  # fmt: skip
    """Return the runs of arms on worlds, seed by seed, whose data `runs.csv` does not have.

    Freezes each arm's recipe and choices.

    Raises:
        UserError: an arm was not tuned, or changed since its first run.
    """
    now = frozen_methods(arms, data, budget)
    before = {row["arm"]: row for row in read_rows(data / FROZEN)}
    for name, row in now.items():
        if before.setdefault(name, row) != row:
            raise UserError(
                f"{name}: its recipe, its trials or the budget changed since it was frozen in "
                f"{data / FROZEN}: give another --output to rank it anew"
            )
    write_rows(data / FROZEN, list(before.values()))
    ranked = {_label(row) for row in read_rows(data / RUNS)}
    return [
        _run(
            arm, worlds, number, folder / f"world-{number}" / f"{name}-{seed}", seed=seed,
            options=tuple(now[name]["values"].split()), prompts="test",
            iterations=int(now[name]["iterations"]),
            # At 28 steps the first run of each method alone: it takes a third of a run's time.
            changes=() if seed else ["evaluation.num_inference_steps=[8,28]"],
        )
        for seed in range(seeds)
        for number in numbers
        for name, arm in arms.items()
        if (name, str(number), str(seed)) not in ranked
    ]  # fmt: skip


def collect(runs: Sequence[Run], data: Path) -> None:
    """Write the data of finished runs; those of runs that are not here stay."""
    finished = [run for run in runs if run.finished]
    names = {_name(run) for run in finished}
    rows = [row for row in read_rows(data / RUNS) if _label(row) not in names]
    rows += map(_row, finished)
    names = dict.fromkeys(name for row in rows for name in row)  # arms differ in their rewards
    if rows:
        write_rows(data / RUNS, [{name: row.get(name, "") for name in names} for row in rows])
    for world in sorted({run.world for run in finished}):
        here = [run for run in finished if run.world == world]
        path = data / f"world-{world}.csv"
        table = read_rows(path) or _images(here[0])
        for run in here:
            scores = _scores(run, run.end)
            for row, score in zip(table, scores, strict=True):
                row[f"{run.arm} {run.seed}"] = score
        write_rows(path, table)


def score_worlds(worlds: Path, numbers: Iterable[int], data: Path) -> None:
    """Score base and clean pipeline on test images of worlds without scores, at 8 and 28 steps."""
    rows: list[dict[str, Any]] = list(read_rows(data / WORLDS))
    scored = {int(row["world"]) for row in rows}
    clean = worlds / "clean"
    if not clean.is_dir():
        save_half(pipeline_of(CLEAN), clean)
    arm = Arm(name="base", options=(), tune={})
    for number in set(numbers) - scored:
        found = {}
        for name, path in (("base", world_folder(worlds, number) / "pipeline"), ("ceiling", clean)):
            run = _run(
                arm, worlds, number, worlds / "unused", seed=0, options=(), iterations=1,
                prompts="test",
                changes=[f"pipeline.path={path}", "evaluation.num_inference_steps=[8,28]"],
            )  # fmt: skip
            means = {row["reward"]: row["mean"] for row in evaluate(run.config)}
            found[name] = f"{means[GOLD]:.4f}"
            found[f"{name} at 28 steps"] = f"{means[f'28_steps/{GOLD}']:.4f}"
        rows.append({"world": number, **found})
        print(f"world {number}: {found}", flush=True)
    write_rows(data / WORLDS, sorted(rows, key=lambda row: int(row["world"])))


def _run(
    arm: Arm, worlds: Path, world: int, folder: Path, *, seed: int, options: tuple[str, ...],
    iterations: int, prompts: str, changes: Sequence[str] = (),
) -> Run:  # fmt: skip
    config = recipe(
        arm, world_folder(worlds, world), seed=seed, folder=folder, iterations=iterations,
        prompts=prompts, changes=[*options, *changes],
    )  # fmt: skip
    return Run(arm=arm.name, world=world, seed=seed, options=options, config=config, folder=folder)


def lean_run(
    arm: Arm, worlds: Path, world: int, folder: Path, *, seed: int, iterations: int,
    prompts: str = "test", images: int = 1, rewards: Sequence[Mapping[str, Any]] = REWARDS,
    changes: Sequence[str] = (),
) -> Run:  # fmt: skip
    """Return a run with these rewards alone, and so many evaluated images of each prompt."""
    config = recipe(
        arm, world_folder(worlds, world), seed=seed, folder=folder, iterations=iterations,
        prompts=prompts, changes=[f"rewards={json.dumps(list(rewards))}", *changes],
    )  # fmt: skip
    config = config.model_copy(update={"rewards": config.rewards[: len(rewards)]})
    config = config.changed("evaluation", num_images=images * config.evaluation.num_images)
    return Run(
        arm=arm.name, world=world, seed=seed, options=tuple(changes), config=config, folder=folder
    )


def _gold(run: Run, iteration: int) -> float:
    return run.evaluation(iteration).measures()[GOLD].nanmean().item()


def _scores(run: Run, iteration: int) -> list[str]:
    values = run.evaluation(iteration).measures()[GOLD]
    return ["" if torch.isnan(v) else f"{v.item():.3g}" for v in values]


def _images(run: Run) -> list[dict[str, str]]:
    """Return what a world's table says of each image, and the base's score."""
    return [
        {name: str(prompt[name]) for name in PLACES} | {"base": score}
        for prompt, score in zip(evaluated_prompts(run), _scores(run, 0), strict=True)
    ]


def evaluated_prompts(run: Run) -> list[dict[str, Any]]:
    """Return the metadata of an evaluation's prompts, in the order of its images."""
    e = run.config.evaluation
    held_out = evaluation_prompts(run.config, ProvidedObjects())
    prompts = PromptSampler(held_out, e.num_images, e.seed, balance=e.balance).at(0)
    return [prompt.metadata for prompt in prompts]


def _row(run: Run) -> dict[str, str]:
    base, end = (run.evaluation(i).measures() for i in (0, run.end))
    return {
        "arm": run.arm,
        "world": str(run.world),
        "seed": str(run.seed),
        "options": " ".join(run.options),
        "iterations": str(run.end),
        **run.resources(),
        "forwards": f"{run.total('forwards/rollout', 'forwards/learn'):.0f}",
        "scored": f"{run.scored_images():.0f}",
        **_means(end, run),
        **{f"base {name}": value for name, value in _means(base, run).items()},
    }


def _means(measures: Mapping[str, Tensor], run: Run) -> dict[str, str]:
    """Return the means of an evaluation, and how far the places of objects are from their law."""
    of_places = {LAYOUT, FREEDOM}
    means = {
        name: f"{values.nanmean().item():.4f}"
        for name, values in sorted(measures.items())
        if not any(name.endswith(place) for place in of_places)
    }
    requests = [row["request"] for row in evaluated_prompts(run)]
    numbers = [list(dict.fromkeys(requests)).index(request) for request in requests]
    found = variety(numbers, measures[LAYOUT].tolist(), measures[FREEDOM].tolist())
    return means | {
        "same_place": f"{found.collisions:.4f}",  # of two right images of a request
        "place_divergence": f"{found.divergence:.4f}",  # nats
    }


def _name(run: Run) -> tuple[str, str, str]:
    return run.arm, str(run.world), str(run.seed)


def _label(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["arm"], row["world"], row["seed"]

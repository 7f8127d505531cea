"""Run the methods of a page: in the background, beside each other, and each run only once."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.api import evaluate
from flowrl.config import Config, config_yaml, load_config
from flowrl.config.load import differences
from flowrl.errors import UserError
from flowrl.training.checkpoint import CONFIG
from flowrl.utils.files import write_text
from scripts.compare.data import (
    CURVES,
    GUIDED,
    IMAGES,
    TUNING,
    Image,
    Line,
    chosen,
    images_of,
    lines_of,
    read_curves,
    read_images,
    read_rows,
    write_curves,
    write_images,
    write_rows,
)
from scripts.compare.page import Method, Page, at_steps

TUNING_SEED = 1000  # of runs on validation prompts; no seed of the report
POLL = 2.0  # seconds between looks at what is running


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of `flowrl train` in a process of its own."""

    name: str
    config: Config
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether the run's last iteration was evaluated.

        Raises UserError where the folder holds a run of other options, as of an earlier page.
        """
        recipe = self.folder / CONFIG
        if recipe.is_file():
            before, own = (c.model_dump(mode="json") for c in (load_config(recipe), self.config))
            if changed := differences(before, own):
                name, (was, now) = next(iter(changed.items()))
                raise UserError(
                    f"{self.folder} holds a run of other options ({name} was {was}, the page has "
                    f"{now}): move it away, or choose other --runs"
                )
        lines = lines_of(self.folder, "", 0) if self.folder.is_dir() else []
        return bool(lines) and lines[-1].iteration == self.config.run.iterations

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it where it was interrupted; its output is beside it."""
        recipe = self.folder.with_suffix(".yaml")
        write_text(recipe, config_yaml(self.config))
        command = [sys.executable, "-m", "flowrl", "train", str(recipe)]
        with self.folder.with_suffix(".log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=_nice
            )


def _nice() -> None:
    os.nice(10)


def run_all(jobs: Sequence[Job], *, at_once: int) -> list[str]:
    """Run what is not finished, so many at once; return the names of runs that failed."""
    waiting = [job for job in jobs if not job.finished]
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished", flush=True)
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    failed: list[str] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            running[job.name] = job, job.start()
            print(f"{time.strftime('%H:%M:%S')} {job.name}", flush=True)
        time.sleep(POLL)
        for name, (job, process) in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            if not job.finished:
                failed.append(name)
                log = job.folder.with_suffix(".log")
                print(f"{name} did not finish, see {log}; the same command tries again", flush=True)
    return failed


def slug(text: str) -> str:
    """Return a name for a file."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


# --- tuning, runs --------------------------------------------------------------------------------


def tuning_jobs(page: Page, runs: Path) -> Iterator[tuple[Method, tuple[str, ...], Job]]:
    """Yield a run on validation prompts for each combination of values to try."""
    for method in page.methods:
        for choice in method.choices() if method.tune else ():
            folder = runs / "tuning" / slug(f"{method.name} {' '.join(choice)}")
            changes = [*choice, f"evaluation.prompts={page.validation}"]
            own = (method.steps or page.steps)[0]  # those it trains at
            changes += [f"evaluation.num_inference_steps={own}"]
            config = page.config(method, TUNING_SEED, folder, *changes)
            name = f"tuning {method.name} {' '.join(choice)}"
            yield method, choice, Job(name=name, config=config, folder=folder)


def tune(page: Page, some: Page, runs: Path, data: Path, *, at_once: int) -> list[str]:
    """Try the values of some methods on validation prompts; write what each of the page scored.

    What was tried elsewhere stays.
    """
    failed = run_all([job for _, _, job in tuning_jobs(some, runs)], at_once=at_once)
    found = list(tuning_jobs(page, runs))
    rows = [
        {"method": method.name, "options": " ".join(choice)}
        | {"score": f"{lines_of(job.folder, '', 0)[-1].scores[page.score]:.4f}"}
        for method, choice, job in found
        if job.finished
    ]
    if rows:
        here = {(row["method"], row["options"]) for row in rows}
        rows += [k for k in read_rows(data / TUNING) if (k["method"], k["options"]) not in here]
        write_rows(data / TUNING, rows)
    return failed


def jobs_of(page: Page, runs: Path, data: Path, seeds: int) -> list[Job]:
    """Return every run of the report, seed by seed, so that fewer seeds are whole, too."""
    tuned = chosen(data)
    return [
        Job(
            name=f"{method.name}, seed {seed}",
            config=page.config(method, seed, folder, *tuned.get(method.name, ())),
            folder=folder,
        )
        for seed in range(seeds)
        for method in page.methods
        for folder in [runs / f"{slug(method.name)}-{seed}"]
    ]


def collect(page: Page, runs: Path, data: Path, seeds: int) -> int:
    """Write the data of all runs that are finished here; return how many those are.

    Data of runs that are not here stay.
    """
    lines: list[Line] = []
    images: list[Image] = []
    done: set[tuple[str, int]] = set()
    order = [(seed, method.name) for seed in range(seeds) for method in page.methods]
    for (seed, name), job in zip(order, jobs_of(page, runs, data, seeds), strict=True):
        if not job.finished:
            continue
        lines += lines_of(job.folder, name, seed)
        if name not in {method for method, _ in done}:
            images += images_of(job.folder, job.config, name, seed, 0)
        images += images_of(job.folder, job.config, name, seed, job.config.run.iterations)
        done.add((name, seed))
    if done:
        based = {method for method, _ in done}
        if (data / CURVES).is_file():
            lines += [k for k in read_curves(data) if (k.method, k.seed) not in done]
        if (data / IMAGES).is_file():
            kept = [k for k in read_images(data) if (k.method, k.seed) not in done]
            images += [k for k in kept if k.iteration or k.method not in based]
        write_curves(data, lines)
        write_images(data, images)
    return len(done)


def score_bases(page: Page, runs: Path, data: Path) -> None:
    """Score the bases of the methods that have guidance to try, on the reported prompts.

    What was scored of others stays. Raises UserError where no method has any.
    """
    tried = [method for method in page.methods if method.guidance]
    if not tried:
        raise UserError(f"no method of page {page.name} that was asked for names a guidance to try")
    names = {method.name for method in tried}
    rows: list[dict[str, Any]] = [k for k in read_rows(data / GUIDED) if k["method"] not in names]
    for method in tried:
        for guidance in method.guidance:
            config = page.config(method, 0, runs, f"evaluation.guidance_scale={guidance}")
            found = {str(row["reward"]): row["mean"] for row in evaluate(config)}
            scores = {name: f"{found[name]:.4f}" for name in at_steps(page, page.score).values()}
            rows.append({"method": method.name, "guidance": f"{guidance:g}"} | scores)
            print(f"{method.name}, guidance {guidance:g}: {scores}", flush=True)
    write_rows(data / GUIDED, rows)

"""One student from three teachers (OPD) on the arena's worlds: what it has of each one's gain.

    python -m scripts.arena.one_student --tune                            world 1 alone
    python -m scripts.arena.one_student --world 2 --world 3 --world 4

NFT trains a teacher on the requests of each domain; the student is distilled on the requests of all
domains, without rewards. Data and page go to `gallery/one-student`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flowrl.functional.contrasts import Interval
from flowrl.utils.files import write_text
from scripts.arena.__main__ import GALLERY, plant_world
from scripts.arena.methods import Arm, load_arms
from scripts.arena.plant import world_folder
from scripts.arena.report import by_request, crossed, interval_text, resampled
from scripts.arena.runs import TUNED_ON, TUNING, Run, lean_run, run_all
from scripts.arena.together import finish, gold_of, opened, unscored
from scripts.compare.data import read_rows, write_rows

DOMAINS = {  # the kinds of requests of each
    "colour": ("colors", "color_attr"),
    "objects": ("single_object", "two_object", "counting"),
    "place": ("position",),
}
BASE, STUDENT, IMAGES = "base", "student", 2  # of each test prompt
TEACHER = ("optim.lr=0.0032", "objective.kl_coef=0")  # NFT's values in the arena
TEACHER_ITERATIONS = 12
TRIALS = (("optim.lr=0.0016", 16), ("optim.lr=0.0032", 16), ("optim.lr=0.0032", 32))
CHOSEN = ("optim.lr=0.0032", 32)


def write_domains(world: Path, folder: Path) -> None:
    """Write the world's prompts with their domains, and those to train on of each alone."""
    for name in ("train", "validation", "test"):
        lines = (world / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [
            prompt | {"domain": domain_of(prompt["tag"])} for prompt in map(json.loads, lines)
        ]
        for domain in ("", *(DOMAINS if name == "train" else ())):
            chosen = [json.dumps(p) for p in prompts if domain in ("", p["domain"])]
            write_text(folder / f"{name}{domain and '-'}{domain}.jsonl", "\n".join(chosen) + "\n")


def domain_of(tag: str) -> str:
    return next(domain for domain, tags in DOMAINS.items() if tag in tags)


def teachers(worlds: Path, folder: Path, number: int) -> list[Run]:
    """Return the runs of a world's teachers."""
    nft = load_arms()["nft"]
    return [
        _run(
            replace(nft, name=domain), worlds, folder, number, TEACHER, TEACHER_ITERATIONS,
            f"train-{domain}",
        )
        for domain in DOMAINS
    ]  # fmt: skip


def student(
    worlds: Path, folder: Path, number: int, trial: tuple[str, int] = CHOSEN, name: str = STUDENT
) -> Run:
    """Return the run of a world's student."""
    place = folder / f"world-{number}"
    taught = [{"lora": str(place / name), "where": {"domain": name}} for name in DOMAINS]
    options = (
        f"objective={json.dumps({'kind': 'distill', 'teachers': taught})}",
        "rollout.prompts_per_iteration=24",
        "rollout.group_size=4",
    )
    arm = Arm(name=name, options=options, tune={})
    return _run(arm, worlds, folder, number, trial[:1], trial[1])


def _run(
    arm: Arm, worlds: Path, folder: Path, number: int, values: Sequence[str], iterations: int,
    train: str = "train",
) -> Run:  # fmt: skip
    place, test = folder / f"world-{number}", "validation" if number == TUNED_ON else "test"
    files = [f"prompts.train={place / train}.jsonl", f"evaluation.prompts={place / test}.jsonl"]
    return lean_run(
        arm, worlds, number, place / arm.name, seed=number, iterations=iterations, prompts=test,
        images=IMAGES, changes=[*values, *files],
    )  # fmt: skip


def score(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row for each test image: its request, its domain, and gold of base and all runs."""
    with opened(runs[0].config) as (evaluator, runtime):
        golds = {BASE: gold_of(evaluator, runtime)}
        golds |= {run.arm: gold_of(evaluator, runtime, run.folder) for run in runs}
    return [
        {name: prompt.metadata[name] for name in ("request", "domain")}
        | {name: f"{gold[i]:.3g}" for name, gold in golds.items()}
        for i, prompt in enumerate(evaluator.prompts)
    ]


# --- the page ------------------------------------------------------------------------------------

Tables = list[tuple[np.ndarray, np.ndarray]]  # by world, as `crossed` takes them


def gains(data: Path, model: str, domain: str) -> Tables:
    """Return a model's gains over the base on a domain, by request."""
    tables = []
    for path in sorted(data.glob("world-*.csv")):
        rows = [row for row in read_rows(path) if row["domain"] == domain]
        values = np.array([[float(row[model]) - float(row[BASE]) for row in rows]])
        tables.append(by_request(values, [row["request"] for row in rows]))
    return tables


def share(student: Sequence[Tables], teacher: Sequence[Tables]) -> Interval:
    """Return the student's gain over its teachers', both averaged over domains.

    Both are resampled with the same worlds and requests.
    """
    ratios = sum(map(resampled, student)) / sum(map(resampled, teacher))
    means = [sum(crossed(one).mean for one in some) for some in (student, teacher)]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(mean=means[0] / means[1], low=float(low), high=float(high))


def write_page(data: Path) -> Path:
    """Write the page from the data; return it."""
    worlds = [path.stem.removeprefix("world-") for path in sorted(data.glob("world-*.csv"))]
    of_student = {domain: gains(data, STUDENT, domain) for domain in DOMAINS}
    of_teacher = {domain: gains(data, domain, domain) for domain in DOMAINS}
    tuned = "Nothing was tuned for it: its rate is the teachers'."
    if (data / TUNING).is_file():
        tuned = f"Its rate was chosen on world 1 ([{TUNING}]({TUNING}))."
    lines = [
        "# One student from three teachers", "",
        f"On each of worlds {', '.join(worlds)} NFT trains a teacher on the requests of one domain "
        f"for {TEACHER_ITERATIONS} iterations, three in all. A student is then distilled from them "
        f"in {CHOSEN[1]} iterations on its own images (`objective.kind: distill`), without "
        "rewards. "
        f"{tuned} Gains "
        f"are of the gold score on test requests, {IMAGES} images of each prompt, less the base's "
        "on the same noise. Intervals of 95 % are crossed over worlds and requests: of one run of "
        "each model on a world. Made by `python -m scripts.arena.one_student`.", "",
        "| domain | its teacher | the other two teachers | student | student's share of its "
        "teacher's gain |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for domain, tags in DOMAINS.items():
        others = [crossed(gains(data, name, domain)) for name in DOMAINS if name != domain]
        ratio = share([of_student[domain]], [of_teacher[domain]])
        cells = [
            f"{domain}: {', '.join(f'`{tag}`' for tag in tags)}",
            interval_text(crossed(of_teacher[domain])), "; ".join(map(interval_text, others)),
            interval_text(crossed(of_student[domain])), share_text(ratio),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    whole = share([*of_student.values()], [*of_teacher.values()])
    lines += ["", f"**Over the three domains** the student has {share_text(whole)} of the gains."]
    path = data / "README.md"
    write_text(path, "\n".join([*lines, ""]))
    return path


def share_text(found: Interval) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def tune(worlds: Path, folder: Path, data: Path) -> list[str]:
    """Try the student's values on world 1's validation requests; return what failed."""
    taught = teachers(worlds, folder, TUNED_ON)
    tried = [
        student(worlds, folder, TUNED_ON, trial, f"{STUDENT}-{n}") for n, trial in enumerate(TRIALS)
    ]
    if failed := run_all([unscored(run) for run in (*taught, *tried)], at_once=1):
        return failed
    images, rows = score([*taught, *tried]), []
    for run in (*taught, *tried):
        row = {"model": run.arm, "options": run.options[0], "iterations": str(run.end)}
        for domain in DOMAINS:
            here = [float(i[run.arm]) - float(i[BASE]) for i in images if i["domain"] == domain]
            row[domain] = f"{np.mean(here):+.4f}"
        rows.append(row)
    write_rows(data / TUNING, rows)
    return []


def main() -> None:
    name = "python -m scripts.arena.one_student"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--world", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--tune", action="store_true", help="try values on world 1")
    parser.add_argument("--worlds", type=Path, default=Path("build/arena"), help="planted worlds")
    parser.add_argument("--runs", type=Path, default=Path("runs/one-student"), help="of all models")
    options = parser.parse_args()
    data, failed = GALLERY / "one-student", []
    for number in (TUNED_ON,) if options.tune else options.world:
        plant_world(number, options.worlds)
        place = options.runs / f"world-{number}"
        write_domains(world_folder(options.worlds, number), place)
        if options.tune:
            failed += tune(options.worlds, options.runs, data)
            continue
        each = [
            *teachers(options.worlds, options.runs, number),
            student(options.worlds, options.runs, number),
        ]
        failed += run_all([unscored(run) for run in each], at_once=1)
        if all(run.finished for run in each):
            write_rows(data / f"world-{number}.csv", score(each))
    finish(write_page, data, failed)


if __name__ == "__main__":
    main()

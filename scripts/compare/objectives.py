"""Compare objectives on the tiny world: each learns, and what it costs in images and time.

    python -m scripts.compare.objectives

Trains the built-in pipeline with each of METHODS on one thread, one run after the other, then
writes gallery/objectives: tables, curves against sampled images and wall time, and their data. Some
80 minutes on one core of a 2-core CPU. Stopped, it goes on with the run where it was; --only NAME
trains some methods alone (a second core can take others), --page writes the page of what is there.
"""

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import flowrl
from flowrl.api import collect
from flowrl.config import Config
from flowrl.training.checkpoint import claim
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_text
from scripts.compare.outcomes import outcome, table
from scripts.compare.runs import (
    Run,
    finished,
    markdown,
    mean_curve,
    train,
    write_charts,
    write_table,
)

SPENT = "spent.json"  # beside an offline data set: what collecting it cost
GOAL = "Flow-GRPO"
QUALITY = "tiny_quality"
SHARED = [
    "optim.schedule=constant",  # so that a score belongs to a cost, not to a planned end
    "optim.micro_batch=96",
    "run.max_minutes=null",
    "run.threads=1",
    "run.trackers=[]",
    "run.sample_every=0",
    "run.checkpoint_every=1000",
    f"evaluation.quality={QUALITY}",
]


@dataclass(frozen=True)
class Family:
    """A section of the page: methods that learn and are measured by the same."""

    title: str
    text: str
    score: str
    changes: tuple[str, ...]
    against_goal: bool = False  # give the costs until Flow-GRPO's last score is reached


@dataclass(frozen=True)
class Stored:
    """An offline data set, sampled with the changes of the family and these; methods share one."""

    name: str
    groups: int
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """A recipe to compare; with a store it learns from that alone."""

    name: str
    family: str
    changes: tuple[str, ...]
    iterations: int
    evaluate_every: int
    seeds: int = 1
    store: Stored | None = None


STRICT = "{name: geneval, args: {mode: strict}, held_out: true}"
WATCHED = f"{{name: {QUALITY}, held_out: true}}"
PARTIAL = (f"rewards=[{{name: geneval, args: {{mode: partial}}}}, {STRICT}, {WATCHED}]",)
PIXELS = (
    f"rewards=[{{name: tiny_colors}}, {STRICT}, {WATCHED}]",
    "prompts.train=tiny:color_attr:train",
    "prompts.balance=null",
    "evaluation.prompts=tiny:color_attr:test",
    "evaluation.balance=null",
)
ODE = ("rollout.tree={kind: ode}",)
FAMILIES = {
    "steps": Family(
        "Learning from denoising steps",
        "Objectives on the reverse process, trained on GenEval's partial score and measured by the "
        "strict one. *Flow-GRPO* has noise in every step but the last, *Flow-GRPO-Fast* in the "
        "first two, which is the quickstart's recipe, with UniGRPO's velocity penalty.",
        "geneval_strict",
        PARTIAL,
        True,
    ),
    "images": Family(
        "Learning from images",
        "Objectives on the forward process, from the same rewards. The last two columns say what "
        "it cost until the mean curve, straight between evaluations, first stood where Flow-GRPO's "
        "ends, and what share that is of Flow-GRPO's cost.",
        "geneval_strict",
        PARTIAL + ODE,
        True,
    ),
    "gradients": Family(
        "Learning from the reward's gradient",
        "A differentiable reward, the colours of the pixels against those of the prompt, on "
        "prompts of two colours and two shapes; the strict GenEval score of the same images is "
        "only watched.",
        "tiny_colors",
        PIXELS + ODE,
    ),
}
OWN = Stored("own", 150, ("objective={kind: gdro}",))
FINE = Stored("fine", 150, ("objective={kind: gdro}", "rollout.num_inference_steps=20"))

NOISY = "times: {kind: schedule, fraction: 0.6}"  # the three noisiest of the rollout's five
MOST = "times: {kind: schedule, fraction: 0.8}"
ALL = "times: {kind: schedule}"
SHARED_DRAWS = f"noising: {{count: 2, {NOISY}}}"
FINE_DRAWS = "noising: {count: 2, share: image, stratified: true, times: {kind: uniform, shift: 3}}"
SLOWER = "optim.lr=4e-4"
METHODS = (
    Method("Flow-GRPO", "steps", ("rollout.tree={kind: flow_grpo}",), 60, 12, seeds=3),
    Method(
        "DiffusionNFT",
        "images",
        (
            f"objective={{kind: nft, kl_coef: 0, noising: {{count: 4, share: image, {ALL}}}}}",
            "optim.updates_per_rollout=2",
        ),
        24,
        4,
        seeds=3,
    ),
    Method(
        "Online DPO",
        "images",
        (
            f"objective={{kind: dpo, implicit_beta: 100, {SHARED_DRAWS}}}",
            "rollout.prompts_per_iteration=24",
            "rollout.group_size=4",
        ),
        40,
        10,
        seeds=3,
    ),
    Method(
        "GDRO, from a store",
        "images",
        (
            "objective={kind: gdro, form: top1, implicit_beta: 6, "
            f"noising: {{count: 2, {MOST}}}}}",
            SLOWER,
        ),
        60,
        12,
        seeds=3,
        store=OWN,
    ),
    Method("Flow-GRPO-Fast", "steps", (), 120, 24),
    Method(
        "GRPO-Guard",
        "steps",
        ("objective.ratio=normalised", "objective.step_weight=equal"),
        80,
        20,
    ),
    Method(
        "TempFlow-GRPO",
        "steps",
        (
            "objective={kind: grpo, step_weight: noise, credit: {edges: fan, scope: leaf}, "
            "kl_coef: 0.0005}",
            "rollout.tree={kind: tempflow, width: 4, at: [0, 1]}",
        ),
        60,
        15,
    ),
    Method(
        "SPO",
        "steps",
        (
            "objective={kind: spo, min_gap: 0.1}",
            "rollout.tree={kind: tree_grpo, branch: 4, window: {kind: fixed, size: 2}}",
            SLOWER,
        ),
        40,
        10,
    ),
    Method(
        "DGPO",
        "images",
        (f"objective={{kind: dgpo, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "LAIR",
        "images",
        (f"objective={{kind: lair, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "KTO",
        "images",
        (f"objective={{kind: kto, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "AWM",
        "images",
        (
            "objective={kind: awm, kl_coef: 0.0005, "
            f"noising: {{count: 2, share: group, stratified: false, {ALL}}}}}",
            SLOWER,
        ),
        30,
        10,
    ),
    Method(
        "SFT, from a fine store",
        "images",
        (
            f"objective={{kind: sft, {FINE_DRAWS}}}",
            "rollout.prompts_per_iteration=16",
            "optim.lr=3e-4",
        ),
        60,
        20,
        store=FINE,
    ),
    Method(
        "Best of n, from a fine store",
        "images",
        (
            f"objective={{kind: sft, winners: one, {FINE_DRAWS}}}",
            "rollout.prompts_per_iteration=48",
            "optim.lr=3e-4",
        ),
        60,
        20,
        store=FINE,
    ),
    Method(
        "RWR, from a fine store",
        "images",
        (
            f"objective={{kind: rwr, rwr_lambda: 0.2, {FINE_DRAWS}}}",
            "rollout.prompts_per_iteration=16",
            "optim.lr=3e-4",
        ),
        60,
        20,
        store=FINE,
    ),
    *(
        Method(name, "gradients", (f"objective={{{objective}}}",), 16, 4)
        for name, objective in (
            ("ReFL", "kind: refl"),
            ("DRaFT-2", "kind: draft, steps: 2"),
            ("DRaFT-LV", "kind: draft_lv"),
            ("AlignProp", "kind: align_prop, truncation: {kind: uniform}"),
            ("SRPO", "kind: srpo"),
            ("LeapAlign", "kind: leap_align"),
            ("FlowBP-Sparse", "kind: flowbp_sparse, steps: 2"),
            ("FlowBP-Bridge", "kind: flowbp_bridge, steps: 3"),
            ("FlowBP-Lagrange", "kind: flowbp_lagrange, supports: 1, active: 1"),
        )
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--output", type=Path, default=Path("gallery/objectives"))
    parser.add_argument("--machine", default="one thread of a 2-core CPU", help="for the page")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train these alone")
    parser.add_argument("--page", action="store_true", help="train nothing")
    options = parser.parse_args()
    for name in options.only:
        if name not in names():
            parser.error(f"no method is called {name!r}: {', '.join(names())}")
    chosen = [m for m in METHODS if not options.page and m.name in (options.only or names())]
    for seed in range(max(m.seeds for m in METHODS)):  # a disturbed hour disturbs all alike
        for method in chosen:
            if seed < method.seeds and not ended(method, seed, options.runs):
                train(learning(method, seed, options.runs))
    write_page(options.runs, options.output, options.machine)


def names() -> list[str]:
    return [method.name for method in METHODS]


def folder_of(method: Method, seed: int, runs: Path) -> Path:
    name = method.name.replace(", ", "-").replace(" ", "-").lower()
    return runs / f"{name}-{seed}"


def store_of(stored: Stored, seed: int, runs: Path) -> Path:
    return runs / f"store-{stored.name}-{seed}"


def configuration(family: Family, seed: int, folder: Path, *changes: str) -> Config:
    own = [f"run.seed={seed}", f"run.output_dir={folder}"]
    return flowrl.load_config("quickstart", [*SHARED, *family.changes, *own, *changes])


def learning(method: Method, seed: int, runs: Path) -> Config:
    """Return a method's configuration, after collecting the data set that it learns from."""
    family = FAMILIES[method.family]
    changes = [
        *method.changes,
        f"run.iterations={method.iterations}",
        f"evaluation.every={method.evaluate_every}",
    ]
    if method.store is not None:
        store = store_of(method.store, seed, runs)
        collect_groups(method.store, family, seed, store)
        changes.append(f"rollout.store.path={store}")
    return configuration(family, seed, folder_of(method, seed, runs), *changes)


def ended(method: Method, seed: int, runs: Path) -> bool:
    return finished(folder_of(method, seed, runs), method.iterations)


def collect_groups(stored: Stored, family: Family, seed: int, folder: Path) -> None:
    """Sample the groups to learn from; start over if stopped, since the time is reported."""
    # Methods share stores: a second process must not begin what the first is at.
    with claim(folder.with_name(folder.name + "-lock"), resume=None):
        if (folder / SPENT).exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        config = configuration(family, seed, folder, *stored.changes)
        (row,) = collect(config, folder, groups=stored.groups)
        spent = {"seconds": time.perf_counter() - began, "images": row["images"]}
        write_text(folder / SPENT, json.dumps(spent))


def read_run(method: Method, seed: int, runs: Path) -> Run:
    spent = {"seconds": 0.0, "images": 0.0}
    if method.store is not None:
        spent = json.loads((store_of(method.store, seed, runs) / SPENT).read_text())
    metrics = read_metrics(folder_of(method, seed, runs))
    return Run(method=method.name, seed=seed, metrics=metrics, **spent)


def write_page(runs: Path, output: Path, machine: str) -> None:
    """Tables, charts and data of all methods whose runs are finished."""
    done: dict[str, list[Run]] = {}
    for method in METHODS:
        seeds = [s for s in range(method.seeds) if ended(method, s, runs)]
        if len(seeds) == method.seeds:
            done[method.name] = [read_run(method, s, runs) for s in seeds]
    every = [run for found in done.values() for run in found]
    write_table(output / "curves.csv", every)
    parts = [f"# Objectives\n\n{INTRODUCTION.format(machine=machine, shared=' '.join(SHARED))}"]
    for name, family in FAMILIES.items():
        methods = [m for m in METHODS if m.family == name and m.name in done]
        if methods:
            parts.append(section(name, family, methods, done, runs, output))
    write_text(output / "README.md", "\n".join(parts))


def section(
    name: str,
    family: Family,
    methods: list[Method],
    done: dict[str, list[Run]],
    runs: Path,
    output: Path,
) -> str:
    """The part of the page for one family."""
    goal = mean_curve(done[GOAL]) if family.against_goal and GOAL in done else None
    level = goal[-1].scores[f"eval/{family.score}"] if goal else None
    outcomes = [
        outcome(
            done[m.name],
            [folder_of(m, s, runs) for s in range(m.seeds)],
            family.score,
            QUALITY,
        )
        for m in methods
    ]
    shown = [run for m in methods for run in done[m.name]]
    axes = ("images", "wall-time")
    write_charts(output, shown, f"eval/{family.score}", axes=axes, prefix=f"{name}-", level=level)
    charts = "\n".join(f"![{family.score} against {axis}]({name}-{axis}.png)" for axis in axes)
    recipes = "\n".join(
        f"| {m.name} | {'; '.join(f'`{c}`' for c in m.changes) or 'none'}"
        + (
            f"; a store of {m.store.groups} groups sampled with {recipe_text(m.store)}"
            if m.store
            else ""
        )
        + " |"
        for m in methods
    )
    return FAMILY.format(
        title=family.title,
        text=family.text,
        charts=charts,
        table=markdown(table(outcomes, family.score, QUALITY, goal)),
        changes=" ".join(f"`{c}`" for c in family.changes),
        recipes=recipes,
    )


def recipe_text(stored: Stored) -> str:
    return "; ".join(f"`{change}`" for change in stored.changes)


INTRODUCTION = """`python -m scripts.compare.objectives`, on {machine}. The built-in pipeline
learns with each objective from its base weights. Scores are those of 600 images of unseen
prompts; a change is that of the last evaluation from the first, image by image, averaged over
the seeds first, with its paired 95 % bootstrap interval. *quality* is `tiny_quality`, from 1 to 5
against the drawing program's own images: a check on what the learned reward misses. *corrected*
is GDRO's corrected score, score * (quality - 3) + 0.2. *images* are those sampled to learn from,
*seconds* those of iterations without evaluations, both including what was spent on a store.

All recipes are the `quickstart` preset with `{shared}`, the changes of their family and their own;
they were tuned by hand, some more than others. `curves.csv` has every evaluation of every run.
"""
FAMILY = """## {title}

{text}

{charts}

{table}

Changes of this family: {changes}

| method | its own changes |
|---|---|
{recipes}
"""


if __name__ == "__main__":
    main()

"""Compare two-stage rollouts on the tiny world: 24 of 96 candidates against 24 of 24.

    python -m scripts.compare.solrl

Trains the built-in pipeline with each of ARMS from three seeds on one thread, one run after the
other, then writes gallery/solrl: tables, charts against iterations and wall time, and their data.
Some 45 minutes on one core of a 2-core CPU. Stopped, it goes on with the run where it was; --more
adds the arms of MORE, which take longer still, --only NAME trains some arms alone (a second core
can take others), --page writes the page of what is there. Options after --change hold for all arms:
for a quick try, in other folders.
"""

import argparse
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import flowrl
from flowrl.api import audit
from flowrl.config import Config
from flowrl.sampling.rank_audit import AuditEvent, AuditLog, AuditReport
from flowrl.training.evaluate import Interval
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_text
from scripts.compare.outcomes import differences, outcome, table
from scripts.compare.runs import (
    TIMES,
    Run,
    finished,
    markdown,
    mean_curve,
    train,
    write_charts,
    write_table,
)

PRESET = "tiny-sd3-solrl-geneval"
SEEDS = (0, 1, 2)
SCORES = {"geneval": "Partial", "geneval_strict": "Strict"}
QUALITY = "tiny_quality"
SHARED = ["run.threads=1", "run.trackers=[]", "run.sample_every=0"]
AXES = ("iterations", "wall-time")
STEPS = (4, 5, 6, 7)  # of candidates, on the base pipeline
AUDITED_PROMPTS = 12
KINDS = (  # of candidates: their precision, and changes
    ("bf16", ()),
    ("nvfp4-emulated", ()),
    ("nvfp4-emulated", ("rollout.explore.four_over_six=true",)),
    ("nvfp4-emulated", ("rollout.explore.min_dim=0",)),
)


@dataclass(frozen=True)
class Arm:
    """A way to sample the images that are learned from, on top of the preset."""

    name: str
    changes: tuple[str, ...] = ()


ARMS = (Arm("24 of 24", ("rollout.explore=null",)), Arm("24 of 96"))
MORE = (
    Arm("24 of 96, not quantised", ("rollout.explore.precision=bf16",)),
    Arm("24 of 96, at random", ("rollout.explore.select=random",)),
)
NAMES = [arm.name for arm in (*ARMS, *MORE)]


@dataclass(frozen=True)
class Place:
    """Where runs lie, and the options that hold for all of them."""

    runs: Path
    changes: tuple[str, ...]

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.runs / f"{arm.name.replace(',', '').replace(' ', '-')}-{seed}"

    def folders(self, arm: Arm) -> list[Path]:
        return [self.folder(arm, seed) for seed in SEEDS]

    def configuration(self, arm: Arm, seed: int) -> Config:
        own = [f"run.seed={seed}", f"run.output_dir={self.folder(arm, seed)}"]
        return flowrl.load_config(PRESET, [*SHARED, *self.changes, *arm.changes, *own])

    def ended(self, arm: Arm, seed: int) -> bool:
        iterations = self.configuration(arm, seed).run.iterations
        return finished(self.folder(arm, seed), iterations)

    def read(self, arm: Arm, seed: int) -> Run:
        return Run(method=arm.name, seed=seed, metrics=read_metrics(self.folder(arm, seed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/solrl"))
    parser.add_argument("--output", type=Path, default=Path("gallery/solrl"))
    parser.add_argument("--machine", default="one thread of a 2-core CPU", help="for the page")
    parser.add_argument("--more", action="store_true", help="train the arms of MORE as well")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train these alone")
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="of all arms")
    parser.add_argument("--page", action="store_true", help="train nothing")
    options = parser.parse_args()
    for name in options.only:
        if name not in NAMES:
            parser.error(f"no arm is called {name!r}: {', '.join(NAMES)}")
    place = Place(options.runs, tuple(options.change))
    wanted = options.only or [arm.name for arm in (*ARMS, *(MORE if options.more else ()))]
    for seed in SEEDS:  # outermost, so that a disturbed hour disturbs all arms alike
        for arm in () if options.page else (*ARMS, *MORE):
            if arm.name in wanted:
                train(place.configuration(arm, seed))
    write_page(place, options.output, options.machine)


def audit_base(place: Place) -> list[dict]:
    """Audit candidates of all KINDS on the base pipeline; read the result if it is there."""
    path = place.runs / "base-audit.json"
    if path.exists():
        return json.loads(path.read_text())
    rows = []
    for precision, changes in KINDS:
        *found, exact, _ = audit(
            PRESET, [*SHARED, *place.changes, *changes], prompts=AUDITED_PROMPTS, steps=STEPS,
            precisions=(precision,),
        )  # fmt: skip
        six = {"four over six": "rollout.explore.four_over_six=true" in changes}
        rows += [row | six for row in found]
    write_text(path, json.dumps([*rows, exact]))
    return [*rows, exact]


def base_section(place: Place) -> str:
    explore = place.configuration(ARMS[1], SEEDS[0]).rollout.explore
    assert explore is not None
    rows = [
        {
            "steps": f"{row['steps']}",
            "precision": row["precision"] + (" 4/6" if row.get("four over six") else ""),
            "layers": f"{row['quantised']:.0%}",
        }
        | {name: f"{row[name]:.3f}" for name in ("tau", "rho", "pooled rho")}
        | {"contrast": f"{row['retention']:.3f}"}
        for row in audit_base(place)
    ]
    text = BASE.format(
        preset=PRESET,
        prompts=AUDITED_PROMPTS,
        options=" ".join(f"--steps {n}" for n in STEPS),
        candidates=explore.candidates,
        steps=rows[-1]["steps"],
    )
    return f"## Which candidates rank well\n\n{wrapped(text)}\n\n{markdown(rows)}\n"


def write_page(place: Place, output: Path, machine: str) -> None:
    """Tables, charts and data of all arms whose seeds have all ended."""
    done = [a for a in (*ARMS, *MORE) if all(place.ended(a, seed) for seed in SEEDS)]
    if not done:
        raise SystemExit(f"no arm has ended with all seeds in {place.runs}: nothing to show")
    runs = {arm.name: [place.read(arm, seed) for seed in SEEDS] for arm in done}
    every = [run for found in runs.values() for run in found]
    write_table(output / "curves.csv", every)
    parts = [introduction(place, machine)]
    for score in SCORES:
        write_charts(output, every, f"eval/{score}", axes=AXES, prefix=f"{score}-")
        parts.append(score_section(place, done, runs, score))
    parts.append(TIME.format(table=markdown(time_rows(runs))))
    parts.append(base_section(place))
    if any(events(place, arm, seed) for arm in done for seed in SEEDS):
        parts.append(AUDITS.format(text=wrapped(AUDITED), table=markdown(audit_rows(place, done))))
    parts.append(f"## What limits it\n\n{wrapped(TRIED)}\n")
    recipes = [f"| {a.name} | {'; '.join(f'`{c}`' for c in a.changes) or 'none'} |" for a in done]
    parts.append(RECIPES.format(preset=PRESET, recipes="\n".join(recipes)))
    write_text(output / "README.md", "\n".join(parts))


def introduction(place: Place, machine: str) -> str:
    config = place.configuration(ARMS[1], SEEDS[0])
    assert config.rollout.explore is not None
    text = INTRODUCTION.format(
        machine=machine,
        rollout=config.rollout,
        explore=config.rollout.explore,
        best=config.rollout.group_size // 2,
        worst=config.rollout.group_size - config.rollout.group_size // 2,
        updates=config.optim.updates_per_rollout,
        seeds=", ".join(map(str, SEEDS)),
        iterations=config.run.iterations,
        images=config.evaluation.num_images,
    )
    parts = text.split("\n\n")
    if place.changes:
        parts.append("Changed for all arms: " + " ".join(f"`{c}`" for c in place.changes))
    return "\n\n".join(["# Two-stage rollouts", *map(wrapped, parts)]) + "\n"


def score_section(place: Place, done: list[Arm], runs: dict[str, list[Run]], score: str) -> str:
    """Charts, the table of all arms, and how far each lies above the first."""
    outcomes = [outcome(runs[arm.name], place.folders(arm), score, QUALITY) for arm in done]
    first = mean_curve(runs[done[0].name])
    text = f"## {SCORES[score]} score\n\n"
    text += "\n".join(f"![{score} against {axis}]({score}-{axis}.png)" for axis in AXES)
    text += f"\n\n{markdown(table(outcomes, score, QUALITY, first))}\n"
    above = [above_row(place, arm, done[0], first[-1].step, score) for arm in done[1:]]
    return text + (f"\n{markdown(above)}\n" if above else "")


def above_row(place: Place, arm: Arm, first: Arm, step: int, score: str) -> dict[str, str]:
    found = differences(place.folders(arm), place.folders(first), step, score)
    columns = [*(f"seed {seed}" for seed in SEEDS), "mean of the seeds"]
    return {f"above {first.name} [95 %]": arm.name} | {
        column: interval(one) for column, one in zip(columns, found, strict=True)
    }


def interval(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:.3f}, {found.high:.3f}]"


def time_rows(runs: dict[str, list[Run]]) -> list[dict[str, str]]:
    """Seconds of an iteration by what they were spent on, the mean over seeds."""
    rows = []
    for name, found in runs.items():
        lines = [line for run in found for line in run.metrics if "time/train" in line]
        spent = {t: sum(line.get(t) or 0.0 for line in lines) / len(lines) for t in TIMES}
        parts = {t.removeprefix("time/").replace("_", " "): f"{s:.2f}" for t, s in spent.items()}
        rows.append({"arm": name} | parts | {"s / iteration": f"{sum(spent.values()):.2f}"})
    return rows


def events(place: Place, arm: Arm, seed: int) -> tuple[AuditEvent, ...]:
    last = place.configuration(arm, seed).run.iterations
    return AuditLog(place.folder(arm, seed)).before(last)


def audit_rows(place: Place, done: list[Arm]) -> list[dict[str, str]]:
    """A row an audit, its numbers the means over its prompts."""
    return [
        {"arm": arm.name, "seed": str(seed), "before iteration": str(event.iteration + 1)}
        | audit_cells(event.report)
        for arm in done
        for seed in SEEDS
        for event in events(place, arm, seed)
    ]


def audit_cells(report: AuditReport) -> dict[str, str]:
    def ends(name: str, digits: int) -> str:
        sides = (report.mean(f"{name}_{side}") for side in ("best", "worst"))
        return " / ".join(f"{side:.{digits}f}" for side in sides)

    return {
        "tau": f"{report.mean('tau'):.3f}",
        "rho": f"{report.rho:.3f}",
        "pooled rho": f"{report.pooled_rho:.3f}",
        "overlap": ends("overlap", 2),
        "rank": ends("rank", 1),
        "perfect": ends("perfect", 1),
        "contrast": f"{report.mean('retention'):.3f}",
        "no rho": f"{report.without_rho} of {len(report.prompts)}",
    }


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


# --- the words of the page ---------------------------------------------------------------------

INTRODUCTION = """`python -m scripts.compare.solrl`, on {machine}. The built-in pipeline learns
GenEval's partial score with DiffusionNFT from its base weights, seeds {seeds}: always from
{rollout.group_size} images of each of {rollout.prompts_per_iteration} prompts, in {iterations}
iterations of {updates} updates. *24 of 24* samples these alone. *24 of 96* samples
{explore.candidates} candidates of each prompt first, in {explore.num_inference_steps} steps instead
of {rollout.num_inference_steps} and in NVFP4, and then those with the {best}
highest and the {worst} lowest scores exactly, from the same noise; the candidates' scores are not
learned from.

Scores are those of {images} images of unseen prompts. A change is that of the last evaluation
from the first, image by image, averaged over the seeds first, with its paired 95 % bootstrap
interval; *above* compares arms in the same way, after the same number of updates. These intervals
know how images differ, not how seeds do: for that compare the columns. *images* are those sampled
to learn from, *candidates* those sampled beside them only to choose by. *seconds* are those of
iterations without evaluations, candidates and audits included. The last columns say what it took
until the mean curve, straight between evaluations, first stood where that of 24 of 24 ends, and
what share that is of its cost.

NVFP4 is emulated here, with its numbers but not its speed. So the charts against iterations show
what the choice is worth per update, and those against wall time what it costs on this machine, not
on one that multiplies NVFP4. Only the image stream's feed-forward layers are quantised, as in
Sol-RL's rules for SD3.5-Large. `curves.csv` has every evaluation of every run."""
TIME = """## Where the time goes

Seconds of an iteration, means over iterations and seeds. *audit* draws all candidates of some
prompts both ways before some iterations, and makes the network that explores; *explore reward* and
*reward* are the waits for scores.

{table}
"""
AUDITED = """Before some iterations all candidates of its prompts are also sampled exactly. tau and
rho are Kendall's and Spearman's within a prompt, averaged over the prompts that have one; *pooled
rho* is that of all together. Of the best and the worst half of the choice: *overlap*, the share
that a choice by exact scores has too, which of equal ones takes the first; *rank*, their mean exact
rank, 1 the highest, ties averaged; *perfect*, that of a choice by exact scores; at random it is
48.5 of 96. *contrast* is the difference of exact scores between the halves, as a share of the
largest possible. *no rho* counts prompts whose scores are all equal."""
AUDITS = """## Do candidates rank as exact images do?

{text}

{table}
"""
BASE = """`flowrl audit {preset} --prompts {prompts} {options}`, with other precisions and layers,
on the pipeline before any training: {candidates} candidates of each prompt, compared by their
partial score with the same ones in {steps} exact steps. *layers* is the share of all weights that
is quantised: of the image stream's feed-forward layers alone (`min_dim: 128`, as in the preset),
or of attention, too (`min_dim: 0`). A rho of 0.8 takes 7 of 8 steps in NVFP4, or 5 with four over
six (`four_over_six: true`, 4/6 in the table), and with attention in four bits it is not reached."""
TRIED = """What limits the gain here, as measured while the recipe was made. At the base, over the
four prompts of an iteration, the share of the gradient's power that repeats from iteration to
iteration is 0.165 for 24 of 24 (24 iterations) and 0.244 for 24 of 96 (16), which is 1.6 times the
information in an update. Where noise does not limit learning that shows in nothing: with updates
from two prompts each, two an iteration, 36 iterations and `optim.lr` 8e-4 the partial scores ended
at 0.798, 0.798 and 0.802 with 24 of 96 (four over six) and at 0.821, 0.787 and 0.795 with 24 of 24.
So the preset updates from one prompt at a time. A score of few values bounds the gain, too: where
half of a prompt's images are right, any 24 have as much contrast as can be. And as the policy
learns, candidates rank less well: one that fails is then often made to fail by few steps alone."""
RECIPES = """## Recipes

`flowrl train {preset}`, with

| arm | changes |
|---|---|
{recipes}
"""


if __name__ == "__main__":
    main()

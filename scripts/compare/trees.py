"""Compare rollouts on the tiny world: chains, a window, trees, and a pruned tree.

    python -m scripts.compare.trees

Trains the built-in pipeline with each of METHODS from the same seeds on one thread, one after the
other, then writes gallery/trees: a table, curves against wall time and forwards, and their data.
Some 80 minutes on one core of a 2-core CPU. Stopped, it goes on where it was.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import flowrl
from flowrl.config import Config
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_text
from scripts.compare.runs import SHARE, Run, markdown, rows, train, write_charts, write_table

SEEDS = (0, 1, 2)
CARD = """# Trees against chains

`python -m scripts.compare.trees`, on {machine}. The built-in pipeline learns GenEval's partial
score, as in the quickstart, with rollouts of different shapes: always 16 images of each of 6
prompts in 5 steps, seeds {seeds}. Scores are those of 600 images of unseen prompts, means over
the seeds, with their standard deviation over seeds. Seconds are those of iterations, without
evaluations; forwards are those of rollouts and training, without backwards and the reference's.

The goal is the final score of Flow-GRPO, in at most {share} of its wall time. *reaches* is when a
method's mean curve, straight between evaluations, first stands there, as a share of that time;
*stays above* is the first evaluation from which on it never falls below; *by seed* compares runs of
one seed.

![Strict score against wall time](wall-time.png)
![Strict score against forwards](forwards.png)

Strict score (all demands of the prompt met, which is not what is trained on):

{strict}

Partial score (share of the demands that are met):

{partial}

Recipes, on top of `quickstart` with `{shared}`. Credit is the quickstart's (all images of the
prompt, `scale: global`) unless a row says otherwise, not what each method's authors use; windows on
the first two steps, where the quickstart has its own, are separated from the shape of the tree by
*Flow-GRPO-Fast, first steps*, chains with that window.

| method | changes |
|---|---|
{recipes}

`curves.csv` has every evaluation of every run.
"""
SHARED = [
    "optim.schedule=constant",  # so that a score belongs to a time, not to a planned end
    "run.max_minutes=null",
    "run.threads=1",
    "run.trackers=[]",
    "run.sample_every=0",
    "run.checkpoint_every=1000",
]


@dataclass(frozen=True)
class Method:
    """A rollout to compare. All sample 16 images of each of 6 prompts in 5 steps."""

    name: str
    iterations: int
    evaluate_every: int
    changes: tuple[str, ...]


DEPTH = ("objective.credit.scope=depth", "objective.credit.scale=std")
BINARY = "rollout.tree={kind: branch_grpo, branch: 2, splits: [0, 1, 2, 3]}"
PRUNED = "rollout.depth_pruning={start: 2, size: 2, stop: 2}"
FAST = "rollout.tree={kind: flow_grpo_fast, window: {kind: fixed, size: 2}}"
MIX = "rollout.tree={kind: mix_grpo, window: {kind: progressive, size: 2, period: 16}}"
TREE = "rollout.tree={kind: tree_grpo, branch: 4, window: {kind: %s, size: 2}}"
METHODS = (
    Method("Flow-GRPO", 60, 10, ("rollout.tree={kind: flow_grpo}",)),
    Method("Flow-GRPO-Fast, first steps", 80, 16, (FAST,)),
    Method("MixGRPO", 80, 16, (MIX,)),
    Method("BranchGRPO", 120, 20, (BINARY, *DEPTH)),
    Method("BranchGRPO, pruned", 120, 20, (BINARY, PRUNED, *DEPTH)),
    Method("BranchGRPO, prompt scope", 120, 20, (BINARY,)),
    Method("TreeGRPO", 120, 20, (TREE % "geometric",)),
    Method("TreeGRPO, first steps", 120, 20, (TREE % "fixed",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/trees"))
    parser.add_argument("--output", type=Path, default=Path("gallery/trees"))
    parser.add_argument("--machine", default="one thread of a 2-core CPU", help="for the card")
    options = parser.parse_args()
    runs = []
    for seed in SEEDS:  # outermost, so that a disturbed hour disturbs all methods alike
        for method in METHODS:
            name = method.name.replace(", ", "-").replace(" ", "-").lower()
            folder = options.runs / f"{name}-{seed}"
            train(configuration(method, seed, folder))
            runs.append(Run(method=method.name, seed=seed, metrics=read_metrics(folder)))
    write_table(options.output / "curves.csv", runs)
    write_charts(options.output, runs, "eval/geneval_strict", axes=("wall-time", "forwards"))
    write_text(options.output / "README.md", card(runs, options.machine))


def configuration(method: Method, seed: int, folder: Path) -> Config:
    own = [
        f"run.seed={seed}",
        f"run.output_dir={folder}",
        f"run.iterations={method.iterations}",
        f"evaluation.every={method.evaluate_every}",
    ]
    return flowrl.load_config("quickstart", [*SHARED, *method.changes, *own])


def card(runs: list[Run], machine: str) -> str:
    """The page of the gallery entry."""
    strict, partial = (
        markdown(rows(runs, f"eval/{name}")) for name in ("geneval_strict", "geneval")
    )
    recipes = "\n".join(f"| {m.name} | {'; '.join(f'`{c}`' for c in m.changes)} |" for m in METHODS)
    return CARD.format(
        strict=strict,
        partial=partial,
        recipes=recipes,
        shared=" ".join(SHARED),
        machine=machine,
        seeds=", ".join(map(str, SEEDS)),
        share=f"{SHARE:.0%}",
    )


if __name__ == "__main__":
    main()

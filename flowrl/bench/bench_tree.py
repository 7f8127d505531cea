"""What branching and pruning save, in wall time and by the plan's own counts, in one run."""

from typing import Any

import torch

from flowrl.bench.rollout import (
    bench_learner,
    best_of,
    sample,
    sampler,
    update,
    with_random_rewards,
)
from flowrl.sampling.rollout import Stopwatch
from flowrl.trees.shape import Counts, count

SPLITS = [0, 3, 6, 9]


def bench_tree(
    *, model: str, prompts: int, batch: int, steps: int, threads: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """16 pictures of each prompt as chains, as a BranchGRPO tree, and as one that is pruned.

    The five steps after the last split are pruned, as in the paper's table (80 edges at 16
    leaves). -> one row a job: best seconds, the ratio to the job it is compared with, the same by
    the counts of the plans, and what is left of one when divided by the other.
    """
    torch.set_num_threads(threads)
    shared = {"prompts": prompts, "group_size": 16, "steps": steps}
    tree = shared | {"tree": {"kind": "branch_grpo", "branch": 2, "splits": SPLITS}}
    after = SPLITS[-1] + 1
    window = {"start": after, "size": min(5, steps - 1 - after), "stop": after}
    learners = {
        "chains": bench_learner(model, device, batch, shared | {"tree": {"kind": "flow_grpo"}}),
        "tree": bench_learner(model, device, batch, tree),
        "pruned": bench_learner(model, device, batch, tree | {"depth_pruning": window}),
    }
    rollouts = {
        name: with_random_rewards(learner.source.collect(0, Stopwatch()))
        for name, learner in learners.items()
    }
    seconds = best_of(
        {
            "draw chains": lambda: sample(learners["chains"]),
            "draw tree": lambda: sample(learners["tree"]),
            "update chains": lambda: update(learners["chains"], rollouts["chains"]),
            "update tree": lambda: update(learners["tree"], rollouts["tree"]),
            "update pruned": lambda: update(learners["pruned"], rollouts["pruned"]),
        },
        repeats,
    )
    counts = {name: count(sampler(learner).plan(0)) for name, learner in learners.items()}
    return [
        _row(seconds, counts, "draw tree", "draw chains"),
        _row(seconds, counts, "update tree", "update chains"),
        _row(seconds, counts, "update pruned", "update tree"),
    ]


def _row(
    seconds: dict[str, float], counts: dict[str, Counts], job: str, other: str
) -> dict[str, Any]:
    def forwards(name: str) -> int:
        what, plan = name.split()
        return counts[plan].forwards if what == "draw" else counts[plan].train_forwards

    ratio, by_counts = seconds[job] / seconds[other], forwards(job) / forwards(other)
    return {
        "job": job,
        "s": seconds[job],
        "against": other,
        "its s": seconds[other],
        "ratio": ratio,
        "by counts": by_counts,
        "of counts": ratio / by_counts,
    }

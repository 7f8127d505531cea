"""What the toolkit costs beyond the network's own passes, as ratios measured in one run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.functional.batches import ALONE
from flowrl.sampling.rollout import Sampler, Timer, sample_request
from flowrl.training.loop import Learner
from flowrl.trajectory import Rollout, Transitions
from flowrl.trees.plan import PlanCounts, count
from flowrl.utils.distributed import Runtime
from scripts.bench.timing import TimedTurns, compare_turns, time_turns

GROUP = 8
SPLITS = [0, 3, 6, 9]  # steps of the tree


def bench_rollout(
    *, model: str, batch: int, steps: int, threads: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """Measure the sampler against its bare forwards, an update against its own passes.

    All with the adapter attached, as training has it; then with the adapter merged into the
    weights. Returns one row a job with its ratio to the bare passes inside: see `compare_turns`.
    """
    torch.set_num_threads(threads)
    if batch % GROUP:
        raise UserError(f"--batch is {batch}, expected a multiple of {GROUP}")
    rollout_options = {
        "prompts_per_iteration": batch // GROUP,
        "group_size": GROUP,
        "num_inference_steps": steps,
    }
    learner = bench_learner(model, device, batch, rollout_options)
    rollout = with_random_rewards(learner.source.collect(0, Timer()))
    transitions: Transitions = learner.objective.prepare(rollout)  # type: ignore[assignment]

    forwards = partial(_forwards, learner, transitions, steps)

    def merged(job: Callable[[], None]) -> None:
        with learner.policy.merged():
            job()

    jobs: dict[str, Callable[[], None]] = {
        "forwards": forwards,
        "forwards and backwards": partial(training_passes, learner, transitions, batch),
        "sampler": partial(sample, learner),
        "update": partial(update, learner, rollout),
        "sampler, LoRA merged": lambda: merged(partial(sample, learner)),
        "forwards, LoRA merged": lambda: merged(forwards),
    }
    turns = time_turns(jobs, repeats, learner.runtime.device)
    pairs = dict.fromkeys(jobs, "forwards") | {
        "update": "forwards and backwards",
        "sampler, LoRA merged": "forwards, LoRA merged",
    }
    return [
        {"job": job, **compare_turns(turns[job], turns[bare]), "to": bare}
        for job, bare in pairs.items()
    ]


def bench_learner(
    model: str,
    device: str,
    batch: int,
    rollout: dict[str, Any],
    *,
    compile: bool = False,
    min_dim: int | None = None,
    **sections: dict[str, Any],
) -> Learner:
    """Build a learner with these options; at most `batch` rows in any forward."""
    config = parse_config(
        {
            "pipeline": {
                "path": model,
                "device": device,
                "max_sequence_length": 12,
                "compile": compile,
                "min_dim": min_dim,
            },
            "prompts": {"train": "tiny:geneval:train"},
            "rewards": [{"name": "brightness"}],
            "rollout": {"batch_size": batch, "merge_lora": False} | rollout,
            "optim": {"micro_batch": batch},
            **sections,
        }
    )
    return build_learner(config, Runtime(device=device), ProvidedObjects())


def with_random_rewards(rollout: Rollout) -> Rollout:
    """Replace the rewards: an update's cost must not depend on what a random network earns."""
    reward = torch.rand(rollout.reward.shape, generator=torch.Generator().manual_seed(0))
    return replace(rollout, reward=reward, valid=torch.ones_like(rollout.valid))


def _forwards(learner: Learner, transitions: Transitions, steps: int) -> None:
    rows = transitions.take((transitions.sigma == transitions.sigma[0]).nonzero().squeeze(1))
    rows = rows.part(0, len(rows.node))
    cond = rows.cond.take(rows.prompt)
    with torch.no_grad():
        for _ in range(steps):
            learner.policy.velocity(rows.x, rows.sigma, cond)


def sample(learner: Learner) -> None:
    """Sample the first iteration's trees; neither decode nor score them."""
    source = sampler(learner)
    plan, own = source.plan(0), source.generator
    request = source.request(0, plan)
    cond, velocity = own.text_cache(request.prompts), learner.policy.velocity
    sample_request(own.backbone, velocity, cond, request, plan, own.schedule(), own.batch_size)


def sampler(learner: Learner) -> Sampler:
    assert isinstance(learner.source, Sampler)  # a bench never reads an offline data set
    return learner.source


def training_passes(learner: Learner, transitions: Transitions, batch: int) -> None:
    """Call the network forwards and backwards for all rows, `batch` at a time, and nothing else."""
    for chunk in ALONE.micro_batches(transitions, batch):
        cond = chunk.cond.take(chunk.prompt)
        learner.policy.velocity(chunk.x, chunk.sigma, cond).square().mean().backward()
    learner.optimizer.zero_grad()


def update(learner: Learner, rollout: Rollout) -> None:
    """Learn from a rollout again: its likelihood ratio is 1 in the first round only."""
    replace(learner, ratio_tolerance=float("inf")).learn(rollout, 0)


def bench_tree(
    *, model: str, prompts: int, batch: int, steps: int, threads: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """Measure 16 images of a prompt as chains, as a BranchGRPO tree, and as a pruned tree.

    The five steps after the last split are pruned, as in the paper's table (80 edges at 16
    leaves). Returns one row a job: its ratio to the job it is compared with, see `compare_turns`,
    the same ratio by the counts of the plans, and the first ratio divided by the second.
    """
    torch.set_num_threads(threads)
    shared = {"prompts_per_iteration": prompts, "group_size": 16, "num_inference_steps": steps}
    tree = shared | {"tree": {"kind": "branch_grpo", "branch": 2, "splits": SPLITS}}
    after = SPLITS[-1] + 1
    window = {"start": after, "size": min(5, steps - 1 - after), "stop": after}
    learners = {
        "chains": bench_learner(model, device, batch, shared | {"tree": {"kind": "flow_grpo"}}),
        "tree": bench_learner(model, device, batch, tree),
        "pruned": bench_learner(model, device, batch, tree | {"depth_pruning": window}),
    }
    rollouts = {
        name: with_random_rewards(learner.source.collect(0, Timer()))
        for name, learner in learners.items()
    }
    turns = time_turns(
        {
            "sample chains": lambda: sample(learners["chains"]),
            "sample tree": lambda: sample(learners["tree"]),
            "update chains": lambda: update(learners["chains"], rollouts["chains"]),
            "update tree": lambda: update(learners["tree"], rollouts["tree"]),
            "update pruned": lambda: update(learners["pruned"], rollouts["pruned"]),
        },
        repeats,
        learners["tree"].runtime.device,
    )
    counts = {name: count(sampler(learner).plan(0)) for name, learner in learners.items()}
    return [
        _row(turns, counts, "sample tree", "sample chains"),
        _row(turns, counts, "update tree", "update chains"),
        _row(turns, counts, "update pruned", "update tree"),
    ]


def _row(
    turns: dict[str, TimedTurns], counts: dict[str, PlanCounts], job: str, other: str
) -> dict[str, Any]:
    def forwards(name: str) -> int:
        what, plan = name.split()
        return counts[plan].forwards if what == "sample" else counts[plan].train_forwards

    found, by_counts = compare_turns(turns[job], turns[other]), forwards(job) / forwards(other)
    return {
        "job": job,
        **found,
        "to": other,
        "by counts": by_counts,
        "of counts": float(found["ratio"]) / by_counts,
    }

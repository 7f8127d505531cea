"""What the toolkit costs beyond the network's own passes, as ratios measured in one run."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flowrl.build.learner import ProvidedObjects, build_learner
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.sampling.rollout import Timer
from flowrl.sampling.rollout import sample_request
from flowrl.sampling.source import Sampler
from flowrl.training.loop import Learner
from flowrl.trajectory import Rollout, Transitions
from flowrl.trees.plan import PlanCounts, count
from flowrl.utils.distributed import Runtime

GROUP = 8


def bench_rollout(
    *, model: str, batch: int, steps: int, threads: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """The sampler against its bare forwards, an update against its forwards and backwards.

    All with the adapter attached, as training has it; then the same with the adapter folded
    into the weights. -> one row a job: best seconds, and the ratio to the bare passes inside.
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
    jobs: dict[str, Callable[[], None]] = {
        "forwards": lambda: _forwards(learner, transitions, steps),
        "sampler": lambda: sample(learner),
        "forwards, LoRA merged": lambda: _merged(
            learner, lambda: _forwards(learner, transitions, steps)
        ),
        "sampler, LoRA merged": lambda: _merged(learner, lambda: sample(learner)),
        "forwards and backwards": lambda: _passes(learner, transitions, batch),
        "update": lambda: update(learner, rollout),
    }
    seconds = best_of(jobs, repeats)
    pairs = {"sampler": "forwards", "update": "forwards and backwards"}
    pairs |= {"sampler, LoRA merged": "forwards, LoRA merged", "forwards, LoRA merged": "forwards"}
    return [
        {"job": job, "seconds": seconds[job], "ratio": seconds[job] / seconds[bare], "to": bare}
        for job, bare in (
            {"forwards": "forwards", "forwards and backwards": "forwards"} | pairs
        ).items()
    ]


def best_of(jobs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Best seconds of each job. Every round runs them all, so that a busy machine disturbs all
    alike; a first round warms up."""
    best = dict.fromkeys(jobs, float("inf"))
    for number in range(repeats + 1):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def bench_learner(model: str, device: str, batch: int, rollout: dict[str, Any]) -> Learner:
    """A learner with these options under `rollout`; at most `batch` rows in any forward."""
    config = parse_config(
        {
            "pipeline": {"path": model, "device": device, "max_sequence_length": 12},
            "prompts": {"train": "tiny:geneval:train"},
            "rewards": [{"name": "brightness"}],
            "rollout": {"batch_size": batch, "merge_lora": False} | rollout,
            "optim": {"micro_batch": batch},
        }
    )
    return build_learner(config, Runtime(device=device), ProvidedObjects())


def with_random_rewards(rollout: Rollout) -> Rollout:
    """What an update costs must not depend on what an untrained pipeline happens to earn."""
    reward = torch.rand(rollout.reward.shape, generator=torch.Generator().manual_seed(0))
    return replace(rollout, reward=reward, valid=torch.ones_like(rollout.valid))


def _forwards(learner: Learner, transitions: Transitions, steps: int) -> None:
    rows = transitions.take((transitions.sigma == transitions.sigma[0]).nonzero().squeeze(1))
    cond = rows.cond.take(rows.prompt)
    with torch.no_grad():
        for _ in range(steps):
            learner.policy.velocity(rows.x, rows.sigma, cond)


def sample(learner: Learner) -> None:
    """Grow the first iteration's forest; neither decoded nor scored."""
    source = sampler(learner)
    plan, stage = source.plan(0), source.generator
    request = source.request(0, plan)
    sample_request(
        stage.backbone,
        learner.policy.velocity,
        stage.text_cache(request.prompts),
        request,
        plan,
        stage.schedule(),
        stage.batch_size,
    )


def sampler(learner: Learner) -> Sampler:
    assert isinstance(learner.source, Sampler)  # a bench never reads a store
    return learner.source


def _merged(learner: Learner, job: Callable[[], None]) -> None:
    with learner.policy.merged():
        job()


def _passes(learner: Learner, transitions: Transitions, batch: int) -> None:
    for chunk in transitions.chunks(batch):
        cond = chunk.cond.take(chunk.prompt)
        learner.policy.velocity(chunk.x, chunk.sigma, cond).square().mean().backward()
    learner.optimizer.zero_grad()


def update(learner: Learner, rollout: Rollout) -> None:
    """Learn from a rollout again and again: its ratio is 1 in the first round only."""
    loose = replace(learner, update=replace(learner.update, ratio_tolerance=float("inf")))
    loose.learn(rollout, 0)


# --- What branching and pruning save, in wall time and by the plan's own counts, in one run ----

SPLITS = [0, 3, 6, 9]


def bench_tree(
    *, model: str, prompts: int, batch: int, steps: int, threads: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """16 images of each prompt as chains, as a BranchGRPO tree, and as one that is pruned.

    The five steps after the last split are pruned, as in the paper's table (80 edges at 16
    leaves). -> one row a job: best seconds, the ratio to the job it is compared with, the same by
    the counts of the plans, and what is left of one when divided by the other.
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
    seconds: dict[str, float], counts: dict[str, PlanCounts], job: str, other: str
) -> dict[str, Any]:
    def forwards(name: str) -> int:
        what, plan = name.split()
        return counts[plan].forwards if what == "sample_request" else counts[plan].train_forwards

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

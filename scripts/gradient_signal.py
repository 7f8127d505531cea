"""Measure how much of each trained step's gradient is signal, at the policy as it is.

    python scripts/gradient_signal.py quickstart-grpo --rollouts 12 \\
        "rollout.tree={kind: branch_grpo, splits: [0, 1, 2, 3]}"

Nothing is learned. With gradients g_1 ... g_M of M independent rollouts,

    power   = mean_m |g_m|^2
    repeats = mean_{m != m'} <g_m, g_m'> / power

`repeats` is the share of the power that is the expected gradient: 0 is noise alone, 1 none.
Gradients add up over steps, so a step that holds most of the power and does not repeat drowns the
others: leave it out by a window or by other splits.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.trajectory import Transitions

Backward = Callable[[Transitions], None]  # accumulates the gradient of some of a batch's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignal:
    """The gradient of one step, or of several, over independent rollouts."""

    rms: float  # root mean square of its norm
    share: float  # of the power of all steps
    repeats: float  # share of its power that repeats


def step_gradients(
    batch: Transitions, steps: Sequence[int], backward: Backward, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """Return the part of the gradient that comes from each step, on the CPU. (S, D)"""
    rows = []
    for step in steps:
        for p in parameters:
            p.grad = None
        backward(batch.take(batch.parent[batch.step == step].unique()))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        rows.append(torch.cat([grad.detach().flatten() for grad in grads]).cpu())
    for p in parameters:
        p.grad = None
    return torch.stack(rows)


def step_signals(gradients: Tensor) -> list[StepSignal]:
    """Return the signal of each step, and last of their sum. gradients: (M, S, D), M rollouts."""
    rollouts = len(gradients)
    if rollouts < 2:
        raise ValueError(f"a signal needs at least two rollouts, got {rollouts}")
    g = torch.cat([gradients, gradients.sum(1, keepdim=True)], 1).double()
    power = g.square().sum(2).mean(0)  # (S + 1,)
    repeated = (g.sum(0).square().sum(1) / rollouts - power) / (rollouts - 1)
    total = power[:-1].sum()
    return [
        StepSignal(
            rms=power[i].sqrt().item(),
            share=(power[i] / total).item(),
            repeats=(repeated[i] / power[i]).item(),
        )
        for i in range(len(power))
    ]


def measure(config: Any, rollouts: int, pipeline: Any = None) -> list[dict[str, Any]]:
    """Return a row for each trained step of a recipe, and one for the whole gradient."""
    from flowrl.api import training_runtime
    from flowrl.assembly.learner import ProvidedObjects, build_learner
    from flowrl.sampling.rollout import Timer
    from flowrl.scoring.spec import closing
    from flowrl.training.metrics import RowMeans

    learner = build_learner(config, training_runtime(config), ProvidedObjects(pipeline=pipeline))
    if learner.objective.needs.states != "transitions":
        raise UserError(
            f"objective.kind {config.objective.kind} does not learn from denoising steps: take "
            "grpo or spo, with a rollout.tree that has noise"
        )
    steps, parameters, each = (), learner.policy.parameters(), []
    with closing(learner.specs):
        for iteration in range(rollouts):
            rollout = learner.source.collect(iteration, Timer())
            batch, tree = learner.objective.prepare(rollout), rollout.tree
            steps = tuple(tree.step[tree.parent[tree.edge]].unique().tolist())

            def backward(part: Transitions, size: int = len(batch), of: Any = rollout) -> None:
                learner.backward(part, size, of, RowMeans())

            each.append(step_gradients(batch, steps, backward, parameters))
    signals = step_signals(torch.stack(each))
    return [
        {"step": name, "rms norm": s.rms, "share of power": s.share, "repeats": s.repeats}
        for name, s in zip([*steps, "all"], signals, strict=True)
    ]


def main() -> None:
    from flowrl.cli._console import print_table
    from flowrl.config import load_config

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a preset's name or a YAML file")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rollouts", type=int, default=6, help="independent rollouts, at least 2")
    words = parser.parse_args()
    print_table(measure(load_config(words.recipe, words.changes), words.rollouts))


if __name__ == "__main__":
    main()

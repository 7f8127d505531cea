"""The loop: draw groups, score them, give credit, step. It knows no objective by name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.backbones.policy import Policy
from flowrl.errors import UserError
from flowrl.objectives.base import Batch, Objective, RewardField, in_pieces
from flowrl.sampling.rollout import Stopwatch
from flowrl.sampling.source import Source
from flowrl.scoring.spec import RewardSpec
from flowrl.training.metrics import RowMeans, rollout_metrics
from flowrl.training.run import Run, SampleGrid
from flowrl.trajectory import Conditioning, Rollout
from flowrl.utils.distributed import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How the optimiser steps: see the options of the same names under `optim`."""

    lr: float
    decay_over: int | None  # iterations in which the learning rate falls to 0
    updates_per_rollout: int
    micro_batch: int
    max_grad_norm: float
    ratio_tolerance: float

    def lr_at(self, iteration: int) -> float:
        """A function of the iteration alone, so that a resumed run needs no memory of it."""
        if self.decay_over is None:
            return self.lr
        return self.lr * max(0.0, 1 - iteration / self.decay_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Everything one iteration needs. All randomness is a function of seed and iteration.

    specs: the rewards, those that are only held out included. reward: the gradient of the trained
    reward at a rollout's images, for objectives that follow it.
    """

    source: Source
    specs: Sequence[RewardSpec]
    policy: Policy
    objective: Objective
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    update: UpdateSettings
    reward: Callable[[Rollout], RewardField]

    def iterate(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """One iteration: a rollout, then the updates that learn from it, and all its metrics."""
        watch = Stopwatch()
        rollout = self.source.collect(iteration, watch)
        metrics = self.learn(rollout, iteration)
        if self.objective.needs.old is not None:
            # For the next rollout, but now: what a failed rollout saves must not move it twice.
            self.policy.remember(self.objective.needs.old.keep(iteration + 1))
        watch.lap("time/train")
        return rollout, rollout_metrics(rollout) | metrics | watch.seconds

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Optimiser steps on one rollout -> metrics, averaged over its rows."""
        u, policy = self.update, self.policy
        for group in self.optimizer.param_groups:
            group["lr"] = u.lr_at(iteration)
        generator = torch.Generator().manual_seed(rollout.seed)
        fields = self._fields(rollout) | {"generator": generator}
        batch = self.objective.prepare(rollout)
        means = RowMeans()
        means.add(batch.metrics(), 1)
        fresh = self.objective.needs.ratio  # nothing has moved since the rollout
        for part in batch.updates(u.updates_per_rollout):
            rows = self.runtime.sum(len(part))  # of all processes
            if not rows:
                continue
            with self.runtime.together():
                self._backward(part, rows, fields, means)
            self._check_loss(means)
            if fresh:
                self._check_ratio(means)
            fresh = False
            self.runtime.reduce_gradients(policy.parameters())
            norm = self.runtime.clip_gradients(policy.parameters(), u.max_grad_norm)
            self._check_norm(norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            policy.after_update()
            means.add({"grad/norm": torch.tensor(norm)}, 1)
        return means.result()

    def _fields(self, rollout: Rollout) -> dict:
        """What the objective declared that it calls, at most a micro-batch of rows at a time."""
        needs, size = self.objective.needs, self.update.micro_batch
        networks = {
            "reference": (needs.reference, self.policy.reference),
            "old": (needs.old is not None, self.policy.old),
        }
        fields: dict = {
            name: in_pieces(field, size) if declared else _undeclared(name)
            for name, (declared, field) in networks.items()
        }
        return fields | ({"reward": self.reward(rollout)} if needs.reward_grad else {})

    def _backward(self, part: Batch, rows: float, fields: dict, means: RowMeans) -> None:
        """Accumulate the gradient of the mean loss over `rows`, a micro-batch at a time."""
        size = self.update.micro_batch
        policy = in_pieces(self.policy.velocity, size)
        for chunk in part.chunks(size):
            with self.runtime.autocast():
                loss, metrics = self.objective.loss(policy, chunk, **fields)
            self.runtime.backward(loss * (len(chunk) / rows))
            means.add(metrics | {"loss": loss.detach()}, len(chunk))

    def _check_loss(self, means: RowMeans) -> None:
        loss = means.result().get("loss", 0.0)
        if self.runtime.any(not math.isfinite(loss)):
            raise UserError(
                "the loss of this update is no finite number, so nothing can be learned from it "
                f"(here it is {loss:g}): lower optim.lr, or see docs/troubleshooting.md"
            )

    def _check_norm(self, norm: float) -> None:
        # A scaler of fp16 gradients skips such steps itself.
        if not math.isfinite(norm) and not self.runtime.scales_gradients:
            raise UserError(
                f"the gradient's norm is {norm} though the loss is finite: lower optim.lr, use "
                "pipeline.dtype fp32, or see docs/troubleshooting.md"
            )

    def _check_ratio(self, means: RowMeans) -> None:
        error = means.result().get("policy/ratio_error_max", 0.0)
        limit = self.update.ratio_tolerance
        # Written so that NaN is an error too; decided together, or the others would wait forever.
        if self.runtime.any(not error <= limit):
            raise UserError(
                f"the policy's ratio to itself is off by {error:.2e} nats in the first pass after "
                f"the rollout, more than optim.ratio_tolerance = {limit:g}: training and rollout "
                "do not compute the same velocities. Set rollout.merge_lora to false, use the same "
                "rollout.batch_size and optim.micro_batch, or pipeline.dtype fp32"
            )


def _undeclared(name: str) -> VelocityField:
    def field(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        raise ValueError(f"the objective calls `{name}`, which its `needs` does not declare")

    return field


def train(learner: Learner, run: Run, *, iterations: int) -> None:
    """Train to `iterations`, from where the run stands; the end always saves.

    Stops early, after a whole iteration, at the run's time limit or when it is asked to. What
    stops it with an error, on every process alike, stops it before an update, and saves too.
    """
    for iteration in range(run.begin(learner.policy, learner.optimizer), iterations):
        updates = learner.policy.updates
        try:
            rollout, metrics = learner.iterate(iteration)
        except UserError:
            if learner.policy.updates == updates:  # or a part of an iteration would be saved
                run.finish()
            learner.source.keep()
            raise
        sheet = SampleGrid.of(rollout)
        del rollout  # or its latents would lie beside those of evaluation, and of the next one
        run.after(iteration, sheet, metrics)
        if run.saved == run.done:
            learner.source.keep()
        if run.should_stop():
            break
    run.finish()
    learner.source.keep()

"""The loop: draw groups, score them, give credit, step. It knows no objective by name."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from flowrl.backbones.base import Backbone
from flowrl.encode import TextCache
from flowrl.errors import UserError
from flowrl.functional.sde import StepKernel
from flowrl.measures import RowMeans, rollout_metrics
from flowrl.objectives.base import Batch, Objective
from flowrl.policy import Policy
from flowrl.prompts import PromptSampler
from flowrl.reward import RewardSpec, check_invalid, train_weights, weighted_sum
from flowrl.rollout import (
    Stopwatch,
    check_finite,
    decode,
    draw,
    gather_result,
    group_request,
    judge,
)
from flowrl.run import Run
from flowrl.runtime import Runtime
from flowrl.samplers.schedule import Schedule
from flowrl.trajectory import Rollout
from flowrl.trees.plan import TreePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How images are drawn: see the options of the same names under `rollout`."""

    plan: Callable[[int], TreePlan]  # of a training iteration
    steps: int
    kernel: StepKernel
    noise_level: float
    batch_size: int
    decode_batch: int
    merge_lora: bool


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
    """Everything one iteration needs. All randomness is a function of seed and iteration."""

    backbone: Backbone
    policy: Policy
    encode: TextCache
    prompts: PromptSampler
    specs: Sequence[RewardSpec]
    objective: Objective
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    rollout: RolloutSettings
    update: UpdateSettings
    max_invalid_fraction: float
    seed: int

    def schedule(self) -> Schedule:
        r = self.rollout
        return Schedule(sigmas=self.backbone.sigmas(r.steps), kernel=r.kernel, level=r.noise_level)

    def iterate(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """One iteration: a rollout, then the updates that learn from it, and all its metrics."""
        watch = Stopwatch()
        rollout = self.collect(iteration, watch)
        metrics = self.learn(rollout, iteration)
        watch.lap("time/train")
        return rollout, rollout_metrics(rollout) | metrics | watch.seconds

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """Grow this process's share of the trees, score it, and learn all processes' scores."""
        r, policy, plan = self.rollout, self.policy, self.rollout.plan(iteration)
        records = self.prompts.at(iteration)
        request = group_request(records, plan, seed=self.seed, iteration=iteration)
        trees = self.runtime.share(len(request.prompt))
        own = request.take(trees)
        policy.remember()
        network = policy.merged() if r.merge_lora else nullcontext()
        # Folded before autocast begins, which would compute the change of the weights in 16 bits.
        with torch.no_grad(), network, self.runtime.autocast():
            tree, cond = draw(
                self.backbone,
                policy.velocity,
                self.encode,
                own,
                plan,
                self.schedule(),
                r.batch_size,
            )
            images = decode(self.backbone, tree.leaves(), r.decode_batch)
        check_finite(images, self.runtime)
        watch.lap("time/rollout")
        result = gather_result(judge(self.specs, images, own), self.runtime)
        watch.lap("time/reward")
        weights = train_weights(self.specs)
        reward, valid = weighted_sum(result, weights)
        check_invalid(valid, max_fraction=self.max_invalid_fraction, errors=result.errors)
        return Rollout(
            tree=tree,
            cond=cond,
            prompts=tuple(p.text for p in own.prompts),
            images=images,
            trees=trees,
            scores=result.scores,
            names=result.names,
            weights=torch.tensor(weights),
            reward=reward,
            valid=valid,
            group=request.prompt.repeat_interleave(len(tree.leaf)),
            log_prob=self.runtime.gather(tree.log_prob),
        )

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Optimiser steps on one rollout -> metrics, averaged over its rows."""
        u, policy = self.update, self.policy
        for group in self.optimizer.param_groups:
            group["lr"] = u.lr_at(iteration)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + iteration)
        batch = self.objective.prepare(rollout)
        means = RowMeans()
        means.add(batch.metrics(), 1)
        fresh = self.objective.needs.ratio  # nothing has moved since the rollout
        for part in batch.updates(u.updates_per_rollout):
            rows = self.runtime.sum(len(part))  # of all processes
            if not rows:
                continue
            self._backward(part, rows, generator, means)
            if fresh:
                self._check_ratio(means)
            fresh = False
            self.runtime.reduce_gradients(policy.parameters())
            norm = self.runtime.clip_gradients(policy.parameters(), u.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            policy.after_update()
            means.add({"grad/norm": torch.tensor(norm)}, 1)
        return means.result()

    def _backward(
        self, part: Batch, rows: float, generator: torch.Generator, means: RowMeans
    ) -> None:
        """Accumulate the gradient of the mean loss over `rows`, a micro-batch at a time."""
        for chunk in part.chunks(self.update.micro_batch):
            with self.runtime.autocast():
                loss, metrics = self.objective.loss(
                    self.policy.velocity,
                    chunk,
                    reference=self.policy.reference,
                    old=self.policy.old,
                    generator=generator,
                )
            self.runtime.backward(loss * (len(chunk) / rows))
            means.add(metrics | {"loss": loss.detach()}, len(chunk))

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


def train(learner: Learner, run: Run, *, iterations: int) -> None:
    """Train to `iterations`, from where the run stands; the end always saves.

    Stops early, after a whole iteration, at the run's time limit or when it is asked to. What
    stops it with an error, on every process alike, stops it before an update, and saves too.
    """
    for iteration in range(run.begin(learner.policy, learner.optimizer), iterations):
        try:
            rollout, metrics = learner.iterate(iteration)
        except UserError:
            run.finish()
            raise
        run.after(iteration, rollout, metrics)
        if run.should_stop():
            break
    run.finish()

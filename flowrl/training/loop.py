"""The training loop: sample and score a rollout, then update the policy. It names no objective."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from flowrl.backbones.base import VelocityField
from flowrl.backbones.policy import OLD, REFERENCE, TEACHER, Policy
from flowrl.config.rollout import OptimOptions, ReferenceOptions
from flowrl.errors import UserError, phase
from flowrl.functional.batches import packed
from flowrl.objectives.base import (
    Batch,
    Models,
    Objective,
    RewardField,
    with_random_rewards,
)
from flowrl.prompts.book import PromptBook
from flowrl.sampling.rewording import Rewording
from flowrl.sampling.rollout import Timer
from flowrl.scoring.spec import RewardSpec
from flowrl.training.metrics import RowMeans, rollout_metrics
from flowrl.training.run import Run
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime


class Source(Protocol):
    """A source of rollouts: `Sampler` samples them, `StoredGroups` reads them from disk."""

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Return this process's share of an iteration's images, with the scores of all images."""
        ...


def train(learner: "Learner", run: Run, *, iterations: int) -> None:
    """Train to `iterations` from where the run stands, and save at the end.

    Stops early, after a whole iteration, at the time limit, by the stop rule or on a signal.
    """
    first = run.begin(learner.policy, learner.optimizer, learner.memories)
    for iteration in range(first, first if run.interrupted else iterations):
        learner.runtime.seed(run.options.seed, iteration)  # a resumed run draws the same
        rollout, metrics = learner.with_kl(run.kl_coef).iterate(iteration)
        with phase("save"):
            run.log(iteration, rollout, metrics)
        del rollout  # or its latents would lie beside those of evaluation, and of the next one
        run.after()
        if run.should_stop():
            break
    run.save()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Everything one iteration needs. All randomness is a function of seed and iteration."""

    source: Source  # of rollouts
    specs: Sequence[RewardSpec]  # the rewards, held-out ones included
    policy: Policy
    objective: Objective
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    optim: OptimOptions
    reference: ReferenceOptions = ReferenceOptions()
    # Largest first log-ratio of an iteration, summed over the latent, in nats. Clips are 0.5 to 13.
    ratio_tolerance: float = 0.1
    iterations: int  # in which a linear schedule of the learning rate falls to 0
    reward_gradient: Callable[[Rollout], RewardField]  # of the trained reward, at its images
    book: PromptBook | None = None  # that chooses the source's prompts
    rewording: Rewording | None = None  # of the source's prompts
    checks_ratio: bool = True  # rollouts are sampled by the very weights that learn from them

    @property
    def memories(self) -> dict[str, Any]:
        """What changes with training beside the policy, by its name in checkpoints."""
        parts = {"book": self.book, "refiner": self.rewording}
        return {name: part for name, part in parts.items() if part is not None}

    def with_kl(self, kl_coef: float | None) -> "Learner":
        """Return a learner with another weight of the KL penalty; None: the recipe's."""
        if kl_coef is None:
            return self
        objective: Any = self.objective
        options = objective.options.model_copy(update={"kl_coef": kl_coef})
        return replace(self, objective=replace(objective, options=options))

    def iterate(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """Collect a rollout, update the policy on it, and return it with all metrics."""
        timer, rows = Timer(), self.policy.backbone.rows
        start = rows.computed
        with phase("rollout"):
            rollout = self.source.collect(iteration, timer)
        sampled = rows.computed
        with phase("learn"):
            with self.policy.sampling_policy_as_old(iteration):
                metrics = self.learn(rollout, iteration)
            old = self.objective.needs.old
            if old is not None:
                # Now, not before the next rollout, where a resumed run would repeat it.
                self.policy.whole = False
                self.policy.update_old(old.decay(iteration + 1))
            if moves_reference(self.reference, iteration, metrics.get("policy/kl")):
                self.policy.whole = False
                self.policy.move_reference()
            if self.book is not None:
                self.policy.whole = False
                self.book.tell(iteration, rollout.group.tolist(), rollout.reward.tolist())
                metrics |= self.book.metrics(iteration)
            if self.rewording is not None:
                self.policy.whole = False
                metrics |= self.rewording.learn(rollout.reward)
        timer.lap("time/train")
        forwards = {"forwards/rollout": sampled - start, "forwards/learn": rows.computed - sampled}
        forwards = {name: self.runtime.sum(count) for name, count in forwards.items()}
        of_rollout = rollout_metrics(rollout, self.runtime)
        return rollout, of_rollout | metrics | forwards | timer.seconds

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Update the policy on one rollout; return metrics averaged over all processes' rows."""
        optim, policy, runtime = self.optim, self.policy, self.runtime
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(optim, iteration, self.iterations)
        batch: Batch = self.objective.prepare(rollout)
        means = RowMeans()
        means.add(batch.metrics(), 1, weight=len(rollout.tree))
        # First pass: the policy still equals the sampling policy, so the ratio is 1.
        check_ratio = self.objective.needs.ratio and self.checks_ratio
        for part in batch.updates(optim.updates_per_rollout):
            rows = runtime.sum(len(part))  # of all processes
            if not rows:
                continue
            with runtime.raise_on_all(at_once=self._in_step):
                self.backward(part, rows, rollout, means)
            metrics = means.result()
            self._check_loss(metrics)
            if check_ratio:
                self._check_ratio(metrics)
            check_ratio = False
            runtime.reduce_gradients(policy.parameters())
            norm = runtime.clip_gradients(policy.parameters(), optim.max_grad_norm)
            self._check_norm(norm)
            policy.whole = False
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not policy.graphs)
            policy.update_ema_and_count()
            means.add({"grad/norm": torch.tensor(norm)}, 1)
        return means.of_all(runtime)

    @property
    def _in_step(self) -> bool:
        """Whether all processes learn from equally many micro-batches, and communicate in each."""
        return self.runtime.in_lockstep or self.objective.needs.update_mean

    def models(self, rollout: Rollout, size: int, rows: int) -> Models:
        """Return the models that the objective declares.

        Args:
            size: forwards in a micro-batch.
            rows: of each call of a network.
        """
        needs, policy, tree = self.objective.needs, self.policy, rollout.tree
        spare = tree.x[:1, 0], rollout.cond.take(tree.prompt[:1])

        def field(velocity: VelocityField) -> VelocityField:
            return self.runtime.batches.velocity(velocity, size, rows, spare)

        def other(adapter: str) -> VelocityField:
            return field(partial(policy.velocity_of, adapter))

        declared: dict[str, Any] = {}
        if needs.reference:
            declared["reference"] = other(REFERENCE)
        if needs.old is not None:
            declared["old"] = other(OLD)
        if needs.teachers:
            numbers = range(len(needs.teachers))
            declared["teachers"] = [other(TEACHER.format(number)) for number in numbers]
        if needs.reward_grad:
            declared["reward_gradient"] = self.reward_gradient(rollout)
        return Models(policy=field(policy.velocity), **declared)

    def backward(self, part: Batch, rows: float, rollout: Rollout, means: RowMeans) -> None:
        """Accumulate the gradient of the mean loss over `rows`, a micro-batch at a time."""
        runtime = self.runtime
        shape = runtime.batches.micro_batch(part, self.optim.micro_batch)
        size, call = (runtime.most(number) for number in shape)
        models = self.models(rollout, size, call)
        for chunk, weight in self._weighted(part, rows, size, rollout):
            self.policy.begin_step()
            if self.objective.needs.update_mean:
                mean = partial(runtime.mean_of_all, counted=weight > 0)
                models = replace(models, update_mean=mean)
            with runtime.autocast():
                loss, metrics = self.objective.loss(models, chunk)
            runtime.backward(loss * weight)
            if weight:
                means.add(metrics | {"loss": loss}, len(chunk))

    def _weighted(
        self, part: Batch, rows: float, size: int, rollout: Rollout
    ) -> Iterator[tuple[Batch, float]]:
        """Yield micro-batches and their weights in the mean.

        In step a process with fewer than the rest repeats its last one with weight 0, or, where it
        has none, learns with weight 0 from rows of the rollout with random rewards.
        """
        batches, missing, chunk = self.runtime.batches, 0, None
        if self._in_step:  # counted first: learning from a micro-batch communicates, too
            count = len(packed(part.units(), size))
            missing = self.runtime.most(count) - count
        for chunk in batches.micro_batches(part, size):
            yield chunk, len(chunk) / rows
        if missing and chunk is None:
            random = self.objective.prepare(with_random_rewards(rollout))
            chunk = next(batches.micro_batches(random, size), None)
            if chunk is None:
                raise UserError(
                    "the objective can use no row of one process, and sharded training needs rows "
                    "on every process: start fewer processes, set runtime.shard to null, or raise "
                    "objective.step_share where it is below 1"
                )
        for _ in range(missing):
            assert chunk is not None
            yield chunk, 0.0

    def _check_loss(self, metrics: dict[str, float]) -> None:
        loss = metrics.get("loss", 0.0)
        if self.runtime.any(not math.isfinite(loss)):
            raise UserError(
                f"the loss is NaN or infinite ({loss:g} on this process): lower optim.lr, or see "
                "docs/troubleshooting.md"
            )

    def _check_norm(self, norm: float) -> None:
        # A scaler of fp16 gradients skips such steps itself.
        if not math.isfinite(norm) and not self.runtime.scales_gradients:
            raise UserError(
                f"the gradient's norm is {norm} though the loss is finite: lower optim.lr, use "
                "pipeline.dtype fp32, or see docs/troubleshooting.md"
            )

    def _check_ratio(self, metrics: dict[str, float]) -> None:
        error = metrics.get("policy/ratio_error_max", 0.0)
        # Written so that NaN is an error too; decided together, or the others would wait forever.
        if self.runtime.any(not error <= self.ratio_tolerance):
            raise UserError(
                "in the first pass after the rollout, the log-ratio of policy to sampling policy "
                f"is {error:.2e} nats, more than {self.ratio_tolerance:g}; both have the same "
                "weights and should compute the same velocities. Set rollout.merge_lora to false, "
                "optim.micro_batch to rollout.batch_size, or pipeline.dtype to fp32"
            )


def learning_rate(options: OptimOptions, iteration: int, iterations: int) -> float:
    """Return the learning rate, a function of the iteration alone: resuming needs no state."""
    risen = min(1.0, (iteration + 1) / (options.warmup + 1))
    left = max(0.0, 1 - iteration / iterations) if options.schedule == "linear" else 1.0
    return options.lr * risen * left


def moves_reference(options: ReferenceOptions, iteration: int, kl: float | None) -> bool:
    """Return whether the reference moves at the end of an iteration, counted from 0."""
    if options.every is not None and (iteration + 1) % options.every == 0:
        return True
    return options.above_kl is not None and kl is not None and kl > options.above_kl

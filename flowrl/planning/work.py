"""How many images, forwards and updates a recipe asks for, of all GPUs together."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from flowrl.assembly.work_split import IterationWork, iteration_work, micro_batches
from flowrl.backbones.call import is_guided
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.planning.dry_run import inspect_reward
from flowrl.planning.model_specs import spec_for
from flowrl.trees.plan import TreePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """Work of all GPUs. Forwards are those of single images, doubled by guidance.

    Training is the most there can be: images that teach nothing are left out.
    """

    images: int = 0  # that are learned from
    candidates: int = 0
    previews: int = 0  # forwards without a graph, of candidates
    sampling: int = 0  # forwards without a graph, of images
    training: int = 0  # forwards with a graph, each with a backward
    recomputed: int = 0  # once more, by checkpointing or where a group exceeds a micro-batch
    reference: int = 0  # forwards of the reference and the old policy
    updates: int = 0  # optimiser steps

    def plus(self, other: "UpdateWork", times: int = 1) -> "UpdateWork":
        names = (f.name for f in fields(self))
        return UpdateWork(**{n: getattr(self, n) + times * getattr(other, n) for n in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationKind:
    """Iterations that sample trees of one plan, after previews of `candidates`, if any."""

    plan: TreePlan
    candidates: TreePlan | None
    load: IterationWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """The work of a run, whose trees may change from iteration to iteration."""

    needs: Needs
    kinds: Mapping[IterationKind, int]  # how many iterations are of each, first first
    first: UpdateWork  # of the first iteration
    total: UpdateWork  # of all iterations, without audits of candidates
    evaluations: int
    evaluation: UpdateWork  # of the first and of the last evaluation
    evaluated: UpdateWork  # of all evaluations


def count_work(config: Config) -> RunWork:
    """Count the work of a whole run."""
    e, needs = config.evaluation, config.objective.build(config.rollout.kernel).needs
    kinds = _iterations(config, needs)
    total = UpdateWork()
    for kind, times in kinds.items():
        total = total.plus(_iteration_work(config, needs, kind.load), times)
    evaluations, evaluation, between = 0, UpdateWork(), UpdateWork()
    if config.held_out:  # before the first iteration, every so many, and after the last
        evaluations = 2 + ((config.run.iterations - 1) // e.every if e.every else 0)
        # The first and last are at all counts of steps, the others at the first.
        evaluation = _evaluation(config, e.step_counts)
        between = _evaluation(config, e.step_counts[:1])
    return RunWork(
        needs=needs,
        kinds=kinds,
        first=_iteration_work(config, needs, next(iter(kinds)).load),
        total=total,
        evaluations=evaluations,
        evaluation=evaluation,
        evaluated=evaluation.plus(evaluation).plus(between, evaluations - 2),
    )


def _evaluation(config: Config, step_counts: Sequence[int]) -> UpdateWork:
    """Return the work of an evaluation at these numbers of steps, at most."""
    e = config.evaluation
    forwards = e.num_images * (1 + doubles(config, e.guidance_scale))
    return UpdateWork(images=e.num_images * len(step_counts), sampling=forwards * sum(step_counts))


def _iterations(config: Config, needs: Needs) -> Counter[IterationKind]:
    """Return how many iterations sample trees of each plan, first first."""
    r = config.rollout
    scopes = [getattr(inspect_reward(e).reward, "scope", "sample") for e in config.rewards]
    groups = [e for e, scope in zip(config.rewards, scopes, strict=True) if scope == "group"]
    whole_trained = any(entry.trained for entry in groups)
    kinds: dict[tuple[TreePlan, TreePlan | None], IterationKind] = {}
    counts: Counter[IterationKind] = Counter()
    planned = config.planned_iterations()
    for iteration in planned:
        plan = r.plan(iteration, config.run.seed)
        candidates = None if r.explore is None else r.candidates(iteration, config.run.seed)
        if (plan, candidates) not in kinds:
            load = iteration_work(
                config, needs, plan, whole_groups=bool(groups), whole_trained=whole_trained,
                candidates=candidates,
            )  # fmt: skip
            kinds[plan, candidates] = IterationKind(plan=plan, candidates=candidates, load=load)
        # In long runs one of several iterations is looked at, and stands for those after it.
        counts[kinds[plan, candidates]] += min(planned.step, config.run.iterations - iteration)
    return counts


def doubles(config: Config, guidance: float) -> bool:
    """Return whether guidance takes a forward with the negative prompt beside each."""
    return is_guided(_class_at(config.pipeline.path, config.pipeline.revision), guidance)


@lru_cache(maxsize=32)
def _class_at(path: str, revision: str | None) -> str:
    """Return a pipeline's class; an empty string where it is not on this machine."""
    try:
        return spec_for(path, revision).pipeline
    except UserError:
        return ""


def _iteration_work(config: Config, needs: Needs, load: IterationWork) -> UpdateWork:
    r = config.rollout
    per_image = 1 + doubles(config, r.guidance_scale) if r.store is None else 0
    rows = load.prompts * min(load.roots * load.rows, load.group_rows or load.roots * load.rows)
    training = rows * load.row_forwards * (1 + doubles(config, r.learning_guidance_scale))
    training = math.ceil(training * getattr(config.objective, "step_share", 1))
    again = config.memory.gradient_checkpointing + config.objective.recomputes
    return UpdateWork(
        images=load.prompts * load.roots * load.leaves,
        candidates=load.prompts * load.candidates * load.candidate_leaves,
        previews=load.prompts * load.candidates * load.candidate_forwards * per_image,
        sampling=load.prompts * load.roots * load.forwards * per_image,
        training=training,
        recomputed=training * (again + _exceeds_micro_batch(load)),
        reference=training * (needs.reference + (needs.old is not None) + len(needs.teachers)),
        updates=load.updates,
    )


def _exceeds_micro_batch(load: IterationWork) -> bool:
    """Return whether images that are compared do not fit one micro-batch: then they run twice."""
    rows = load.roots * load.rows
    group = min(rows, load.group_rows or rows)
    groups = load.prompts // load.updates if load.together == "update" else 1
    largest = max(micro_batches(load, [group] * groups))
    return load.together != "image" and largest * load.row_forwards > load.micro_batch

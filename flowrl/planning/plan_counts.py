"""How many pictures, forwards and updates a recipe asks for, before anything is drawn."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from flowrl.build.build_geometry import build_load
from flowrl.build.work_split import Load, micro_batches
from flowrl.config import Config
from flowrl.objectives.base import Needs
from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count

AGAIN = ("refl", "draft_lv", "srpo")  # compute the network's answer once more on the way back
UNGUIDED = ("flux",)  # guidance is an input there, and costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all GPUs. Forwards are those of single pictures; guidance counts twice where it doubles.

    pictures: that are learned from; candidates: that are explored. exploring, drawing: forwards
    without graph. learning: forwards with one, each with a backward; again: computed once more
    for it, by checkpointing or where a group is larger than a micro-batch; beside: of the
    reference and the lagging policy. updates: optimiser steps. Learning is the most there can be:
    pictures that teach nothing are left out.
    """

    pictures: int = 0
    candidates: int = 0
    exploring: int = 0
    drawing: int = 0
    learning: int = 0
    again: int = 0
    beside: int = 0
    updates: int = 0

    def plus(self, other: "Work", times: int = 1) -> "Work":
        names = (f.name for f in fields(self))
        return Work(**{n: getattr(self, n) + times * getattr(other, n) for n in names})

    @property
    def forwards(self) -> int:
        return self.exploring + self.drawing + self.learning + self.again + self.beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What some iterations draw, and explore before it, if anything; and what that asks for."""

    plan: TreePlan
    candidates: TreePlan | None
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """kinds: of iterations that hold different numbers of latents, the first one's first. loads:
    how many iterations ask for each; work: of all of them, audits among exploring; evaluation:
    forwards of one, and evaluations: their number."""

    kinds: tuple[Kind, ...]
    loads: Mapping[Load, int]
    first: Work
    work: Work
    evaluation: int
    evaluations: int


def doubles(config: Config, guidance: float) -> bool:
    """Whether guidance takes a forward with the negative prompt beside each."""
    return config.pipeline.backbone not in UNGUIDED and guidance > 1


def draws_nothing(config: Config) -> bool:
    """Whether all groups are read from a store."""
    store = config.rollout.store
    return store is not None and store.path is not None and store.refresh_every is None


def count_run(config: Config, needs: Needs, *, whole_groups: bool, whole_trained: bool) -> RunWork:
    """The work of a whole run, whose trees may change from iteration to iteration."""
    r, seed = config.rollout, config.run.seed
    found: Counter[Load] = Counter()
    known: dict = {}
    kinds: dict = {}
    for iteration in range(config.run.iterations):
        plan = r.plan(iteration, seed)
        candidates = None if r.explore is None else r.candidates(iteration, seed)
        if (plan, candidates) not in known:
            known[plan, candidates] = build_load(
                config, needs, plan, whole_groups=whole_groups, whole_trained=whole_trained,
                candidates=candidates,
            )  # fmt: skip
            kind = Kind(plan=plan, candidates=candidates, load=known[plan, candidates])
            kinds.setdefault((kind.load, count(plan), candidates and count(candidates)), kind)
        found[known[plan, candidates]] += 1
    work = Work()
    for load, times in found.items():
        work = work.plus(work_of(config, needs, load), times)
    return RunWork(
        kinds=tuple(kinds.values()),
        loads=found,
        first=work_of(config, needs, next(iter(found))),
        work=work.plus(_audits(config)),
        evaluation=evaluation_forwards(config),
        evaluations=_evaluations(config),
    )


def work_of(config: Config, needs: Needs, load: Load) -> Work:
    """Of one iteration."""
    r, objective = config.rollout, config.objective
    training = r.guidance if r.training_guidance is None else r.training_guidance
    twice = 0 if draws_nothing(config) else 1 + doubles(config, r.guidance)
    rows = load.prompts * min(load.roots * load.rows, load.group_rows or load.roots * load.rows)
    learning = rows * load.row_forwards * (1 + doubles(config, training))
    checkpoints = config.memory.gradient_checkpointing + (objective.kind in AGAIN)
    return Work(
        pictures=load.prompts * load.roots * load.leaves,
        candidates=load.prompts * load.candidates * load.candidate_leaves,
        exploring=load.prompts * load.candidates * load.candidate_forwards * twice,
        drawing=load.prompts * load.roots * load.forwards * twice,
        learning=learning,
        again=learning * (checkpoints + _cut(load)),
        beside=learning * (needs.reference + (needs.old is not None)),
        updates=load.updates,
    )


def _cut(load: Load) -> bool:
    """Whether what is compared is larger than a micro-batch, hence forwarded once more."""
    rows = load.roots * load.rows
    group = min(rows, load.group_rows or rows)
    groups = load.prompts // load.updates if load.together == "update" else 1
    largest = max(micro_batches(load, [group] * groups))
    return load.together != "image" and largest * load.row_forwards > load.micro_batch


def _audits(config: Config) -> Work:
    """Candidates that are drawn exactly to see whether the cheap ones rank as they do."""
    e, r = config.rollout.explore, config.rollout
    if e is None or not e.audit.every:
        return Work()
    times = -(-config.run.iterations // e.audit.every)
    plan = r.plan(0, config.run.seed)
    forwards = count(plan).forwards // plan.roots * (1 + doubles(config, r.guidance))
    drawn = times * e.audit.prompts * e.candidates
    return Work(exploring=drawn * forwards)


def evaluation_forwards(config: Config) -> int:
    """Of one evaluation, at most: paraphrases are drawn once more. 0 where there is none."""
    e = config.evaluation
    if e.prompts is None:
        return 0
    return e.images * e.steps * (1 + doubles(config, e.guidance)) * (1 + e.paraphrases)


def _evaluations(config: Config) -> int:
    """Before the first iteration, every so many, and after the last."""
    e = config.evaluation
    if e.prompts is None:
        return 0
    return 2 + ((config.run.iterations - 1) // e.every if e.every else 0)

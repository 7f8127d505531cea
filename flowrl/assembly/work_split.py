"""Compute the share of an iteration that each of several GPUs gets, without running it.

What is sampled and learned from depends on the recipe alone: every process knows all images'
rewards, groups are dealt to updates by their number, and the loss of an update is a mean over the
images of all processes. The number of GPUs decides only how long it takes.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.functional.batches import packed
from flowrl.objectives.base import Needs
from flowrl.trees.plan import TreePlan, continued_widths, count


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """The work of one iteration, of all GPUs together."""

    prompts: int  # hence groups
    roots: int  # trees of a prompt
    leaves: int = 1  # images of a tree
    forwards: int = 1  # of a tree
    candidates: int = 0  # trees of a prompt that are explored first
    candidate_leaves: int = 1
    candidate_forwards: int = 0
    whole_prompts: bool = False  # one process samples all trees of a prompt
    whole_candidates: bool = False
    rows: int = 1  # learned from a tree: images, chains, or nodes with trained children
    group_rows: int | None = None  # at most, of a prompt; None is no bound
    row_forwards: int = 1
    together: Literal["image", "group", "update"] = "image"  # whose rows share a micro-batch
    micro_batch: int  # forwards, at most
    updates: int = 1  # optimiser steps
    judge: str = "the objective"  # what compares images, for messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """One GPU's part of an iteration."""

    prompts: int
    candidates: int  # of all its prompts, as trees
    trees: int
    images: int  # of candidates and trees, as forwards
    forwards: int
    rows: tuple[int, ...]  # one number for each update
    micro_batches: tuple[int, ...]  # backward passes of each update


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSplit:
    """The shares of all GPUs."""

    load: IterationWork
    shares: tuple[ProcessShare, ...] = field(repr=False)

    @property
    def gpus(self) -> int:
        return len(self.shares)

    @property
    def update_rows(self) -> tuple[int, ...]:
        """The rows of each update on all GPUs, its effective batch."""
        return tuple(sum(column) for column in zip(*(s.rows for s in self.shares), strict=True))

    @property
    def even(self) -> bool:
        """Whether no GPU ever waits for another, after sampling and after every update."""
        return len({(share.forwards, share.rows) for share in self.shares}) == 1


def split_work(load: IterationWork, gpus: int) -> WorkSplit:
    """Return the shares of `gpus` processes, as training deals them; they may be uneven.

    Raises UserError where a process would have no tree.
    """
    check_split(load, gpus)
    unit = load.candidates if load.whole_candidates else 1
    explored = deal(load.prompts * load.candidates, gpus, unit)
    sampled = deal(load.prompts * load.roots, gpus, load.roots if load.whole_prompts else 1)
    shares = (_share(load, *share) for share in zip(explored, sampled, strict=True))
    return WorkSplit(load=load, shares=tuple(shares))


def check_split(load: IterationWork, gpus: int) -> None:
    """Raise UserError unless each of `gpus` processes gets work in every iteration."""
    if gpus < 1:
        raise UserError(f"got {gpus} GPUs, expected at least 1")
    if units(load) >= gpus:
        return
    least = gpus if load.whole_prompts else -(-gpus // load.roots)
    least = -(-least // load.updates) * load.updates  # whole updates
    if load.whole_prompts:
        raise UserError(
            f"rollout.prompts_per_iteration is {load.prompts}, but {gpus} processes take whole "
            f"prompts, whose images {load.judge} compares: the nearest that work are "
            f"rollout.prompts_per_iteration={least}, or {units(load)} processes"
        )
    raise UserError(
        f"{units(load)} trees cannot be shared among {gpus} processes, which take whole ones: the "
        f"nearest that work are rollout.prompts_per_iteration={least}, or {units(load)} processes"
    )


def units(load: IterationWork) -> int:
    """Return the number of parts that can be dealt: prompts if they are whole, else trees."""
    return load.prompts if load.whole_prompts else load.prompts * load.roots


def deal(total: int, parts: int, unit: int = 1) -> list[range]:
    """Return consecutive ranges of 0 to total in whole units, like `Runtime.local_rows`.

    The first parts get one more where they cannot be equal.
    """
    if not total:
        return [range(0)] * parts
    each, more = divmod(total // unit, parts)
    ends = [(part * each + min(part, more)) * unit for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def _share(load: IterationWork, candidates: range, trees: range) -> ProcessShare:
    in_group = Counter(tree // load.roots for tree in trees)  # trees by the number of their group
    explored = {tree // load.candidates for tree in candidates}
    rows = {
        group: min(count * load.rows, load.group_rows or count * load.rows)
        for group, count in in_group.items()
    }
    parts = [[n for g, n in rows.items() if g % load.updates == i] for i in range(load.updates)]
    return ProcessShare(
        prompts=len(in_group.keys() | explored),
        candidates=len(candidates),
        trees=len(trees),
        images=len(trees) * load.leaves + len(candidates) * load.candidate_leaves,
        forwards=len(trees) * load.forwards + len(candidates) * load.candidate_forwards,
        rows=tuple(sum(part) for part in parts),
        micro_batches=tuple(len(micro_batches(load, part)) for part in parts),
    )


def micro_batches(load: IterationWork, groups: list[int]) -> list[int]:
    """Return the rows of each backward pass over groups, like `Batches.micro_batches`."""
    most = max(1, load.micro_batch // load.row_forwards)
    total = sum(groups)
    units = {"image": [1] * total, "group": groups, "update": [total]}[load.together]
    units = [size for size in units if size]
    rows = iter(units)
    return [sum(next(rows) for _ in range(length)) for length in packed(units, most)]


def iteration_work(
    config: Config,
    needs: Needs,
    plan: TreePlan,
    *,
    whole_groups: bool = False,
    whole_trained: bool = False,
    candidates: TreePlan | None = None,
) -> IterationWork:
    """Return the work of the iterations that sample `plan`, and before it `candidates`, if any.

    Rows are the most there can be: what has no reward or no advantage is left out while training.

    Args:
        whole_groups: a reward compares the images of a prompt.
        whole_trained: one that is trained does.
    """
    r, u, objective = config.rollout, config.optim, config.objective
    tree, explored = count(plan), None if candidates is None else count(candidates)
    forwards = tree.forwards // plan.roots
    if candidates is not None and candidates.continuation is not None:
        forwards = sum(continued_widths(candidates))  # the earlier ones count with candidates
    transitions = needs.states == "transitions"
    judge = "rollout.explore, whose precision is bf16," if r.prunes_in_place else "a reward"
    judge = f"objective.kind {objective.kind}" if needs.complete_groups else judge
    together = "group" if needs.complete_groups else "image"
    together = "update" if needs.update_mean else together
    return IterationWork(
        prompts=r.prompts_per_iteration,
        roots=plan.roots,
        leaves=tree.leaves // plan.roots,
        forwards=forwards,
        candidates=candidates.roots if candidates else 0,
        candidate_leaves=explored.leaves // candidates.roots if candidates and explored else 1,
        candidate_forwards=explored.forwards // candidates.roots if candidates and explored else 0,
        whole_prompts=needs.complete_groups or whole_groups or r.prunes_in_place,
        whole_candidates=whole_trained or r.prunes_in_place,
        rows=(tree.train_forwards if transitions else tree.leaves) // plan.roots,
        group_rows=objective.group_images,
        row_forwards=objective.forwards(r.num_inference_steps),
        together=together if needs.states == "endpoints" else "image",
        micro_batch=u.micro_batch,
        updates=u.updates_per_rollout,
        judge=judge,
    )

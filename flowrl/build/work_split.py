"""Who does what of an iteration: the shares of several GPUs, before any of them is rented.

What is drawn and learned from depends on the recipe alone: every process knows all images'
rewards, groups are dealt to updates by their number, and the loss of an update is a mean over the
images of all processes. How many there are decides only how long it takes; `Runtime.share` deals
trees, and these functions count what falls to each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.trees.plan import TreePlan, count


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What one iteration asks of all GPUs together.

    prompts: hence groups. roots: trees of a prompt; leaves: images of a tree; forwards:
    velocities of a tree. candidates: trees of a prompt that are explored first, of so many leaves
    and forwards each. whole_prompts: one process draws all trees of a prompt; whole_candidates:
    the same while exploring.
    rows: what is learned from a tree (images, chains, or nodes with trained children), and
    group_rows: at most, of a prompt; None is no bound. row_forwards: forwards of a row.
    together: rows of an "image", "group" or "update" are never cut apart, in micro-batches of at
    most micro_batch forwards. updates: optimiser steps of the iteration.
    judge: who compares images, for people.
    """

    prompts: int
    roots: int
    leaves: int = 1
    forwards: int = 1
    candidates: int = 0
    candidate_leaves: int = 1
    candidate_forwards: int = 0
    whole_prompts: bool = False
    whole_candidates: bool = False
    rows: int = 1
    group_rows: int | None = None
    row_forwards: int = 1
    together: Literal["image", "group", "update"] = "image"
    micro_batch: int
    updates: int = 1
    judge: str = "the objective"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """One GPU's part of an iteration. candidates, trees: of all its prompts; forwards, images:
    of both. rows, micro_batches: one number for each update, the latter its backward passes."""

    prompts: int
    candidates: int
    trees: int
    images: int
    forwards: int
    rows: tuple[int, ...]
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSplit:
    """The shares of all GPUs, and what they make together."""

    load: IterationWork
    shares: tuple[ProcessShare, ...] = field(repr=False)

    @property
    def gpus(self) -> int:
        return len(self.shares)

    @property
    def update_rows(self) -> tuple[int, ...]:
        """The effective batch of each update: rows of all GPUs."""
        return tuple(sum(column) for column in zip(*(s.rows for s in self.shares), strict=True))

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time that GPUs work, by phase, if a forward takes as long everywhere: they
        wait for the slowest after drawing and after every update. 1 is no waiting."""
        drawing = [share.forwards for share in self.shares]
        slowest = sum(max(column) for column in zip(*(s.rows for s in self.shares), strict=True))
        rows = sum(self.update_rows)
        return {
            "drawing": sum(drawing) / (self.gpus * max(drawing)) if max(drawing) else 1.0,
            "learning": rows / (self.gpus * slowest) if slowest else 1.0,
        }

    @property
    def even(self) -> bool:
        """Whether no GPU ever waits for another."""
        return all(share == 1 for share in self.busy.values())


def split_work(load: IterationWork, gpus: int) -> WorkSplit:
    """The shares of `gpus` processes, as training deals them; an uneven one is no error.

    Raises UserError, with the nearest numbers that work, where a process would have no tree or an
    update a part of a group.
    """
    check_split(load, gpus)
    if load.prompts % load.updates:
        raise UserError(
            f"rollout.prompts_per_iteration is {load.prompts} and optim.updates_per_rollout "
            f"{load.updates}, but an update takes whole groups: the nearest "
            "rollout.prompts_per_iteration that works is "
            f"{_multiple(load.prompts, load.updates)}"
        )
    return _solve(load, gpus)


def check_split(load: IterationWork, gpus: int) -> None:
    """Raises UserError unless every one of `gpus` processes gets work in every iteration."""
    if gpus < 1:
        raise UserError(f"got {gpus} GPUs, expected at least 1")
    if load.together == "update" and gpus > 1:
        raise UserError(
            f"{load.judge} compares all images of an update with their mean, which {gpus} "
            "processes do not share: start one process, or take another objective"
        )
    if units(load) >= gpus:
        return
    least = _least_prompts(load, gpus)
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
    """What can be dealt: prompts where they are whole, else their trees."""
    return load.prompts if load.whole_prompts else load.prompts * load.roots


def nearest_gpus(load: IterationWork, gpus: int) -> tuple[int, ...]:
    """The numbers of GPUs nearest to `gpus`, below and above, among which nobody waits."""
    last = 1 if load.together == "update" else units(load)
    good = [n for n in range(1, last + 1) if _may_be_even(load, n) and _solve(load, n).even]
    below, above = [n for n in good if n <= gpus], [n for n in good if n > gpus]
    return (*below[-1:], *above[:1])


def nearest_prompts(load: IterationWork, gpus: int) -> tuple[int, ...]:
    """The numbers of prompts nearest to the load's, below and above, with which nobody waits."""
    if load.together == "update" and gpus > 1:
        return ()

    def good(prompts: int) -> bool:
        other = replace(load, prompts=prompts)
        return units(other) >= gpus and _may_be_even(other, gpus) and _solve(other, gpus).even

    unit, start = load.updates, load.prompts - load.prompts % load.updates
    below = next((n for n in range(start, 0, -unit) if good(n)), None)
    # A multiple of GPUs and updates always works.
    above = next(n for n in range(start + unit, start + unit * gpus + 1, unit) if good(n))
    return (above,) if below is None else (below, above)


def _may_be_even(load: IterationWork, gpus: int) -> bool:
    """Quickly rules out what cannot be dealt in equal parts."""
    return not units(load) % gpus


def _least_prompts(load: IterationWork, gpus: int) -> int:
    """The fewest prompts that give each process something, in whole updates."""
    least = gpus if load.whole_prompts else -(-gpus // load.roots)
    return -(-least // load.updates) * load.updates


def _multiple(value: int, unit: int) -> int:
    """The multiple nearest to a value, at least one; of two the smaller."""
    return max(unit, (value + (unit - 1) // 2) // unit * unit)


def _solve(load: IterationWork, gpus: int) -> WorkSplit:
    explored = deal(load.prompts * load.candidates, gpus, _unit(load.candidates, load))
    drawn = deal(load.prompts * load.roots, gpus, load.roots if load.whole_prompts else 1)
    shares = (_share(load, *own) for own in zip(explored, drawn, strict=True))
    return WorkSplit(load=load, shares=tuple(shares))


def _unit(candidates: int, load: IterationWork) -> int:
    return candidates if load.whole_candidates else 1


def deal(total: int, parts: int, unit: int = 1) -> list[range]:
    """Consecutive ranges of 0 to total, in whole runs of `unit`: as `Runtime.share` deals rows.

    The first parts get one more where they cannot be equal.
    """
    if not total:
        return [range(0)] * parts
    runs = total // unit
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + runs // parts + (part < runs % parts))
    return [range(a * unit, b * unit) for a, b in zip(ends, ends[1:], strict=False)]


def _share(load: IterationWork, candidates: range, trees: range) -> ProcessShare:
    own = dict(_by_group(trees, load.roots))
    explored = dict(_by_group(candidates, load.candidates)) if load.candidates else {}
    rows = {
        group: min(count * load.rows, load.group_rows or count * load.rows)
        for group, count in own.items()
    }
    parts = [[n for g, n in rows.items() if g % load.updates == i] for i in range(load.updates)]
    return ProcessShare(
        prompts=len(own | explored),
        candidates=len(candidates),
        trees=len(trees),
        images=len(trees) * load.leaves + len(candidates) * load.candidate_leaves,
        forwards=len(trees) * load.forwards + len(candidates) * load.candidate_forwards,
        rows=tuple(sum(part) for part in parts),
        micro_batches=tuple(len(micro_batches(load, part)) for part in parts),
    )


def _by_group(trees: range, roots: int) -> Iterator[tuple[int, int]]:
    """(number of a group, trees of it in the range)."""
    at = trees.start
    while at < trees.stop:
        end = min(trees.stop, (at // roots + 1) * roots)
        yield at // roots, end - at
        at = end


def micro_batches(load: IterationWork, groups: list[int]) -> list[int]:
    """Rows of each backward pass over groups of so many rows: what `Batch.chunks` makes."""
    most = max(1, load.micro_batch // load.row_forwards)
    total = sum(groups)
    if load.together == "update":
        return [total] if total else []
    if load.together == "image":
        return [min(most, total - start) for start in range(0, total, most)]
    lengths: list[int] = []
    for rows in groups:
        if lengths and lengths[-1] + rows <= most:
            lengths[-1] += rows
        elif rows:
            lengths.append(rows)
    return lengths


# --- From options to the work of an iteration, which `flowrl.build.work_split` deals to proce --


def iteration_work(
    config: Config,
    needs: Needs,
    plan: TreePlan,
    *,
    whole_groups: bool = False,
    whole_trained: bool = False,
    candidates: TreePlan | None = None,
) -> IterationWork:
    """What the iterations ask for that draw `plan`, and before it `candidates`, if any.

    whole_groups: a reward compares the images of a prompt; whole_trained: one that is trained.
    Rows are the most there can be: what has no reward or no advantage is left out while training.
    """
    r, u, objective = config.rollout, config.optim, config.objective
    tree = count(plan)
    on_images = needs.states == "endpoints"
    transitions = needs.states == "transitions"
    return IterationWork(
        prompts=r.prompts_per_iteration,
        roots=plan.roots,
        leaves=tree.leaves // plan.roots,
        forwards=tree.forwards // plan.roots,
        candidates=0 if candidates is None else candidates.roots,
        candidate_leaves=1 if candidates is None else count(candidates).leaves // candidates.roots,
        candidate_forwards=0
        if candidates is None
        else count(candidates).forwards // candidates.roots,
        whole_prompts=needs.complete_groups or whole_groups,
        whole_candidates=whole_trained,
        rows=(tree.train_forwards if transitions else tree.leaves) // plan.roots,
        group_rows=2 if objective.kind == "dpo" else None,  # the best and the worst
        row_forwards=1 if transitions else row_forwards(objective, r.num_inference_steps),
        together=_together(needs) if on_images else "image",
        micro_batch=u.micro_batch,
        updates=u.updates_per_rollout,
        judge=f"objective.kind {objective.kind}"
        if needs.complete_groups or needs.whole_update
        else "a reward",
    )


def _together(needs: Needs) -> Any:
    if needs.whole_update:
        return "update"
    return "group" if needs.complete_groups else "image"


def row_forwards(objective: Any, steps: int) -> int:
    """Velocities with a gradient that the loss of one image or chain takes, at most."""
    if hasattr(objective, "noising"):
        return objective.noising.count
    of_chain = {
        "draft": lambda o: min(o.steps, steps),
        "draft_lv": lambda o: o.copies,
        "align_prop": lambda o: steps,
        "srpo": lambda o: 1 + o.inversion,
        "leap_align": lambda o: 2,
        "flowbp_sparse": lambda o: min(o.steps, steps),
        "flowbp_bridge": lambda o: min(o.steps, steps),
        "flowbp_lagrange": lambda o: min(2 * min(o.active, o.supports), steps),
    }
    return of_chain[objective.kind](objective) if objective.kind in of_chain else 1

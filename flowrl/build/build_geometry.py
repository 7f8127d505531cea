"""From options to the work of an iteration, which `flowrl.build.work_split` deals to processes."""

from typing import Any

from flowrl.build.work_split import Load
from flowrl.config import Config
from flowrl.objectives.base import Needs
from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count


def build_load(
    config: Config,
    needs: Needs,
    plan: TreePlan,
    *,
    whole_groups: bool = False,
    whole_trained: bool = False,
    candidates: TreePlan | None = None,
) -> Load:
    """What the iterations ask for that draw `plan`, and before it `candidates`, if any.

    whole_groups: a reward compares the pictures of a prompt; whole_trained: one that is trained.
    Rows are the most there can be: what has no reward or no advantage is left out while training.
    """
    r, u, objective = config.rollout, config.optim, config.objective
    tree = count(plan)
    on_pictures = needs.states == "endpoints"
    transitions = needs.states == "transitions"
    return Load(
        prompts=r.prompts,
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
        row_forwards=1 if transitions else row_forwards(objective, r.steps),
        together=_together(needs) if on_pictures else "image",
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
    """Velocities with a gradient that the loss of one picture or chain takes, at most."""
    if hasattr(objective, "draws"):
        return objective.draws.count
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

"""Options of trees: each one reaches the plan, and what cannot work names its option."""

from pydantic import TypeAdapter

from flowrl.trees.plan import count
from flowrl.trees.presets import PRESETS, Tree

ADAPTER = TypeAdapter(Tree)
LEAVES = {"tree_grpo": 27, "b2_diffurl": 20, "tempflow": 114, "g2rpo": 36, "e_grpo": 24}


def plan(kind: str, *, iteration=0, steps=20, leaves=16, seed=0, **options):
    section = ADAPTER.validate_python({"kind": kind} | options)
    return section.plan(iteration=iteration, steps=steps, leaves=leaves, seed=seed)


def test_plans_depend_on_seed_and_iteration_alone():
    for kind in [k for k in PRESETS if k != "custom"]:
        leaves = LEAVES.get(kind, 16)
        made = [plan(kind, iteration=i, leaves=leaves, seed=4) for i in range(0, 200, 10)]
        assert made == [plan(kind, iteration=i, leaves=leaves, seed=4) for i in range(0, 200, 10)]
        assert {count(p).leaves for p in made} == {leaves}
        moves = kind not in ("ode", "flow_grpo", "branch_grpo", "tempflow")
        assert (len(set(made)) > 1) == moves
    for kind in ["flow_grpo_fast", "dance_grpo", "tree_grpo", "g2rpo", "e_grpo"]:
        leaves = LEAVES.get(kind, 16)
        first, second = (
            [plan(kind, iteration=i, leaves=leaves, seed=seed) for i in range(20)]
            for seed in (0, 1)
        )
        assert first != second

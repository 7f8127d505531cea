"""Options of trees: each one reaches the plan, and what cannot work names its option."""

from pydantic import TypeAdapter

from flowrl.trees.plan import NoiseCoupling, count
from flowrl.trees.presets import PRESETS, Tree

ADAPTER = TypeAdapter(Tree)
LEAVES = {"tree_grpo": 27, "b2_diffurl": 20, "tempflow": 114, "g2rpo": 36, "e_grpo": 24}


def plan(kind: str, *, iteration=0, steps=20, leaves=16, seed=0, **options):
    section = ADAPTER.validate_python({"kind": kind} | options)
    return section.plan(iteration=iteration, steps=steps, leaves=leaves, seed=seed)


def make(kind: str, steps: int, leaves: int, at=None, **options):
    return PRESETS[kind](**options).make(steps, leaves, at)


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


def test_options_reach_the_plan():
    for made, expected in [
        (plan("flow_grpo_fast", window={"kind": "all"}), make("flow_grpo_fast", 20, 16, range(19))),
        (
            plan("mix_grpo", iteration=50),
            make("mix_grpo", 20, 16, range(2, 6)),
        ),
        (
            plan("branch_grpo", branch=4, splits=[2, 5], coupling={"kind": "simplex"}),
            make(
                "branch_grpo",
                20,
                16,
                branch=4,
                splits=(2, 5),
                coupling=NoiseCoupling(kind="simplex"),
            ),
        ),
        (
            plan("branch_grpo_mix", iteration=30, splits=[2]),
            make("branch_grpo_mix", 20, 16, range(1, 5), splits=(2,)),
        ),
        (
            plan("tree_grpo", branch=4, window={"kind": "fixed", "size": 2, "start": 3}),
            make("tree_grpo", 20, 16, range(3, 5), branch=4),
        ),
        (plan("b2_diffurl", branch=4, iteration=43), make("b2_diffurl", 20, 16, 17, branch=4)),
        (
            plan("tempflow", branch=4, splits=[1, 5]),
            make("tempflow", 20, 16, branch=4, splits=(1, 5)),
        ),
        (
            plan("g2rpo", leaves=24, branch=4, splits=[1, 5]),
            make("g2rpo", 20, 24, (1, 5), branch=4),
        ),
        (
            plan("e_grpo", branch=4, splits=[1, 5]),
            make("e_grpo", 20, 16, (1, 5), branch=4),
        ),
    ]:
        assert made == expected

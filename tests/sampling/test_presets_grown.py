import torch
from toy_forest import Counting, grown

from flowrl.trajectory import transitions
from flowrl.trees.plan import count
from flowrl.trees.presets import PRESETS

T = 8
# Options, and images of a prompt: two trees of each where trees have a size of their own.
SIZES: dict[str, tuple[dict, int]] = {
    "flow_grpo": ({}, 5),
    "flow_grpo_fast": ({}, 5),
    "dance_grpo": ({}, 5),
    "mix_grpo": ({"window": {"kind": "progressive", "size": 3, "period": 2}}, 5),
    "branch_grpo": ({"splits": [0, 2, 5]}, 16),
    "branch_grpo_mix": ({"splits": [1, 4], "window": {"kind": "fixed", "size": 2}}, 8),
    "tree_grpo": ({"branch": 2}, 16),
    "b2_diffurl": ({"branch": 3}, 6),
    "tempflow": ({"branch": 2}, 2 * 2 * (T - 1)),
    "g2rpo": ({"branch": 2}, 2 * 2 * 3),
    "e_grpo": ({"branch": 2}, 2 * 2 * 2),
}


def test_every_preset_is_here():
    assert SIZES.keys() == PRESETS.keys() - {"custom", "ode"}  # which has no noise


def plan_of(name: str, iteration: int = 0):
    options, leaves = SIZES[name]
    section = PRESETS[name](**({"kind": name} | options))
    return section.plan(iteration=iteration, steps=T, leaves=leaves, seed=0)  # type: ignore[attr-defined]


def test_the_plan_counts_what_the_sampler_does():
    for name in SIZES:
        for iteration in [0, 3, 50]:
            plan = plan_of(name, iteration)
            field, counts = Counting(size=3), count(plan)
            tree = grown(plan, prompts=1, field=field)
            assert counts.leaves == SIZES[name][1] == len(tree.leaves())
            assert field.rows == counts.forwards == tree.forwards
            assert tree.x.shape[:2].numel() == counts.nodes
            assert counts.nodes == counts.edges + plan.roots
            kept = torch.ones(len(tree), len(tree.edge))
            batch = transitions(tree, kept, kept.bool(), tree.prompt, None)  # type: ignore[arg-type]
            assert (len(batch), len(batch.x)) == (counts.trained_edges, counts.train_forwards)

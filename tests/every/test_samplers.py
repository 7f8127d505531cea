"""Every sampler and every shape of tree draws and is learned from, on every family."""

import pytest
from families import FAMILIES, assert_learns, on_every, pipeline_of

from flowrl.config.trees import PRESETS
from flowrl.functional.sde import KERNELS

ROLLOUT = {"prompts": 1, "group_size": 4, "steps": 3, "tree": {"kind": "flow_grpo"}}
FIRST = {"kind": "fixed", "size": 1}
# Options where a preset needs some to be small, and pictures of a prompt other than four.
TREES = {
    "flow_grpo": ({}, 4),
    "flow_grpo_fast": ({"window": FIRST}, 4),
    "dance_grpo": ({}, 4),
    "mix_grpo": ({"window": FIRST}, 4),
    "branch_grpo": ({"splits": [0, 1]}, 4),
    "branch_grpo_mix": ({"splits": [0, 1], "window": FIRST}, 4),
    "tree_grpo": ({"branch": 2, "window": FIRST}, 4),
    "dynamic_tree": ({"window": FIRST}, 4),
    "b2_diffurl": ({"branch": 2}, 4),
    "tempflow": ({"width": 2, "at": [0, 1]}, 4),
    "g2rpo": ({"width": 2, "at": [0], "strides": [1, 2]}, 4),
    "e_grpo": ({"width": 2, "at": [0]}, 4),
}


@pytest.fixture
def learner(make_learner, tiny_pipeline_path):
    def make(family, **changes):
        return make_learner(pipeline=pipeline_of(family, tiny_pipeline_path), **changes)

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sampler_draws_and_what_it_drew_is_learned_from(learner, kernel, family):
    level = 1.0 if kernel == "renoise" else 0.7
    assert_learns(learner(family, rollout=ROLLOUT | {"kernel": kernel, "noise_level": level}), 1)


def test_every_tree_is_here():
    assert TREES.keys() == PRESETS.keys() - {"custom", "ode"}


@pytest.mark.parametrize(("kind", "family"), on_every(TREES))
def test_a_tree_is_grown_and_learned_from(learner, kind, family):
    options, leaves = TREES[kind]
    rollout = ROLLOUT | {"group_size": leaves, "tree": {"kind": kind} | options}
    assert_learns(learner(family, rollout=rollout), 1)

"""Every sampler and every shape of tree draws and is learned from, on every family."""

import pytest
from families import assert_learns, in_turn

from flowrl.config.trees import PRESETS
from flowrl.functional.sde import KERNELS

ROLLOUT = {
    "prompts_per_iteration": 1,
    "group_size": 4,
    "num_inference_steps": 3,
    "tree": {"kind": "flow_grpo"},
}
FIRST = {"kind": "fixed", "size": 1}
# Options where a preset needs some to be small.
TREES = {
    "flow_grpo": {},
    "flow_grpo_fast": {"window": FIRST},
    "dance_grpo": {},
    "mix_grpo": {"window": FIRST},
    "branch_grpo": {"splits": [0, 1]},
    "branch_grpo_mix": {"splits": [0, 1], "window": FIRST},
    "tree_grpo": {"branch": 2, "window": FIRST},
    "b2_diffurl": {"branch": 2},
    "tempflow": {"width": 2, "at": [0, 1]},
    "g2rpo": {"width": 2, "at": [0]},
    "e_grpo": {"width": 2, "at": [0]},
}


@pytest.mark.parametrize(("kernels", "family"), in_turn(KERNELS))
def test_a_sampler_generates_and_its_images_are_learned_from(make_learner, kernels, family):
    for kernel in kernels:
        noise = {"kernel": kernel, "noise_level": 1.0 if kernel == "renoise" else 0.7}
        assert_learns(make_learner(rollout=ROLLOUT | noise, pipeline={"backbone": family}), 1)


@pytest.mark.parametrize(("kinds", "family"), in_turn(TREES))
def test_a_tree_is_grown_and_learned_from(make_learner, kinds, family):
    assert TREES.keys() == PRESETS.keys() - {"custom", "ode"}
    for kind in kinds:
        size = 6 if kind == "g2rpo" else 4  # three strides of two children
        rollout = ROLLOUT | {"tree": {"kind": kind} | TREES[kind], "group_size": size}
        assert_learns(make_learner(rollout=rollout, pipeline={"backbone": family}), 1)

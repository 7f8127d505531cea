"""Every objective iterates on the tiny pipelines, and every number it logs is documented."""

import math

import pytest
import torch
from families import assert_learns, in_turn

from flowrl.errors import UserError

ODE = {
    "prompts_per_iteration": 2,
    "group_size": 4,
    "num_inference_steps": 4,
    "tree": {"kind": "ode"},
}
TREE = ODE | {"tree": {"kind": "tree_grpo", "branch": 4, "window": {"kind": "fixed", "size": 1}}}
CHAINS = ODE | {"tree": {"kind": "flow_grpo"}}

# A few images of an untrained size: implicit rewards are tiny, so scales are large.
SCORED = {
    "grpo": ({"kind": "grpo", "kl_coef": 0.1}, CHAINS),
    "grpo guard": ({"kind": "grpo", "ratio": "normalised", "step_weight": "equal"}, CHAINS),
    "tempflow": (
        {"kind": "grpo", "step_weight": "noise", "credit": {"edges": "fan", "scope": "leaf"}},
        ODE | {"tree": {"kind": "tempflow", "width": 2, "at": [0, 1]}},
    ),
    "spo": ({"kind": "spo", "min_gap": 0.0}, TREE),
    "nft": ({"kind": "nft", "noising": {"count": 2}}, ODE),
    "dpo": ({"kind": "dpo", "kl_coef": 0.1}, ODE),
    "online dpo": ({"kind": "dpo", "anchor_every": 2}, ODE),
    "gdro": ({"kind": "gdro"}, ODE),
    "gdro, top-1": ({"kind": "gdro", "form": "top1"}, ODE),
    "sft": ({"kind": "sft"}, ODE),
    "best of n": ({"kind": "sft", "winners": "one"}, ODE),
    "rwr": ({"kind": "rwr"}, ODE),
    "awm": ({"kind": "awm", "noising": {"count": 2, "stratified": False}}, ODE),
    "kto": ({"kind": "kto"}, ODE),
    "kto, threshold": ({"kind": "kto", "like_above": 0.5}, ODE),
    "dgpo": ({"kind": "dgpo", "kl_coef": 0.1}, ODE),
    "lair": ({"kind": "lair"}, ODE),
    "on a tree": ({"kind": "gdro"}, TREE),
}


@pytest.mark.parametrize(("names", "family"), in_turn(SCORED))
def test_an_objective_learns_from_scores(make_learner, names, family):
    for name in names:
        objective, rollout = SCORED[name]
        assert_learns(
            make_learner(objective=objective, rollout=rollout, pipeline={"backbone": family})
        )


FOLLOWED = {
    "refl": {},
    "draft": {"steps": 2, "kl_coef": 0.1},
    "draft_lv": {},
    "align_prop": {"truncation": "uniform"},
    "srpo": {"hinge": 1.0},
    "leap_align": {},
    "flowbp_sparse": {"steps": 2},
    "flowbp_bridge": {"steps": 2},
    "flowbp_lagrange": {"supports": 1, "active": 1},
}


@pytest.mark.parametrize(("kinds", "family"), in_turn(FOLLOWED))
def test_an_objective_follows_the_gradient_of_the_tiny_worlds_colours(make_learner, kinds, family):
    for kind in kinds:
        learner = make_learner(
            pipeline={"backbone": family},
            objective={"kind": kind} | FOLLOWED[kind],
            rollout=ODE | {"group_size": 2},
            specs=[{"name": "tiny_colors"}],
            prompts={"train": "tiny:color_attr:train"},
        )
        assert_learns(learner)


def test_a_reward_without_a_gradient_is_refused_before_training(make_learner):
    with pytest.raises(UserError, match="objective.kind refl .*geneval"):
        make_learner(objective={"kind": "refl"}, rollout=ODE, specs=[{"name": "geneval"}])


def test_a_loss_that_is_no_number_stops_before_the_update(make_learner, monkeypatch):
    learner = make_learner(objective={"kind": "sft"}, rollout=ODE)
    before = [p.clone() for p in learner.policy.parameters()]
    loss = learner.objective.loss

    def broken(self, models, batch):
        value, metrics = loss(models, batch)
        return value * math.nan, metrics

    monkeypatch.setattr(type(learner.objective), "loss", broken)
    with pytest.raises(UserError, match="optim.lr"):
        learner.iterate(0)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))

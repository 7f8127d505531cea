"""The old policy is the one that sampled the images, and forwards are counted exactly."""

import pytest
import torch

from flowrl.backbones.policy import OLD, POLICY

ROLLOUT = {"num_inference_steps": 2}
ODE, CHAINS = {"tree": {"kind": "ode"}}, {"tree": {"kind": "flow_grpo"}}
OLD_POLICIES = {
    "nft": {"kind": "nft", "noising": {"count": 2}, "old_decay": {"rate": None, "limit": 0.5}},
    "awm": {"kind": "awm", "noising": {"count": 1}},
    "online gdro": {"kind": "gdro", "anchor_every": 2},
}


@pytest.mark.parametrize(
    ("name", "staleness"), [("nft", 0), ("nft", 1), ("awm", 1), ("online gdro", 1)]
)
def test_the_old_policy_is_the_one_that_sampled(make_learner, monkeypatch, name, staleness):
    learner = make_learner(
        objective=OLD_POLICIES[name],
        rollout=ROLLOUT | ODE | {"staleness": staleness},
    )
    policy, adapter = learner.policy, OLD if learner.objective.needs.old.samples else POLICY
    sampled: dict[int, list[torch.Tensor]] = {}
    sampler = getattr(learner.source, "sampler", learner.source)
    plan, learned = sampler.plan, []

    def watched(iteration):
        sampled[iteration] = policy.weights(adapter)
        return plan(iteration)

    object.__setattr__(sampler, "plan", watched)
    loss = type(learner.objective).loss

    def seen(self, models, batch):
        learned.append(policy.weights(OLD))
        return loss(self, models, batch)

    monkeypatch.setattr(type(learner.objective), "loss", seen)
    for iteration in range(4):
        learned.clear()
        learner.iterate(iteration)
        assert learned
        for weights in learned:
            assert all(map(torch.equal, weights, sampled[iteration]))
    assert not all(map(torch.equal, sampled[0], sampled[3]))

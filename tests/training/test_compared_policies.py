"""The old policy is the one that sampled the images; the reference is the base or moves."""

import pytest
import torch
from crashes import SMALLEST

from flowrl.backbones.policy import OLD, POLICY
from flowrl.training.checkpoint import read_checkpoint
from flowrl.training.loop import train
from flowrl.training.tracking import read_metrics

# --- the old policy ------------------------------------------------------------------------------


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
    plan, learned = sampler.plan(0), []

    def watched(iteration):
        sampled[iteration] = policy.weights(adapter)
        return plan

    object.__setattr__(sampler, "plans", watched)
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


# --- the reference -------------------------------------------------------------------------------


SMALL = SMALLEST | {"tree": {"kind": "flow_grpo"}}


@pytest.fixture
def trained(make_run):
    """Train the tiny pipeline with a reference that moves; return the run and its divergences."""

    def make(**reference):
        _, learner, run = make_run(
            rollout=SMALL, objective={"kind": "grpo", "kl_coef": 0.1}, reference=reference,
            run={"checkpoint_every": 1, "keep_checkpoints": 9},
        )  # fmt: skip
        with run.session():
            train(learner, run, iterations=4)
        return run, [row["policy/kl"] for row in read_metrics(run.folder)]

    return make


def test_without_moves_the_reference_is_the_base(trained):
    """It is equal to the policy at the start alone."""
    _, divergences = trained()
    assert divergences[0] == 0 and all(kl > 0 for kl in divergences[1:])


def test_it_moves_after_so_many_iterations(trained):
    run, divergences = trained(every=2)
    assert [kl == 0 for kl in divergences] == [True, False, True, False]
    saved = read_checkpoint(run.checkpoints.path(2))["policy"]["adapters"]
    assert all(map(torch.equal, saved["reference"], saved["default"]))


def test_it_moves_where_the_divergence_passes_a_bound(trained):
    _, divergences = trained(above_kl=1e-12)
    assert [kl == 0 for kl in divergences] == [True, False, True, False]

"""The reference of the KL penalty: the base, or the policy of an earlier iteration."""

import pytest
import torch
from crashes import SMALLEST

from flowrl.training.checkpoint import read_checkpoint
from flowrl.training.loop import train
from flowrl.training.tracking import read_metrics

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

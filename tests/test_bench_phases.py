"""Whose time and memory it was."""

import pytest
import torch
from torch import nn

from flowrl.bench import iteration as bench_phases
from flowrl.bench.iteration import PHASES, Timeline, measure

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A processor whose time only passes when it is told to."""
    now = [0.0]
    monkeypatch.setattr(bench_phases.time, "process_time", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_time_belongs_to_the_phase_that_was_entered_last(clock):
    timeline = Timeline(CPU)
    clock(100)  # before all phases
    for name, seconds in [("rollout", 3), ("decode", 2), ("rollout", 4), ("training", 5)]:
        timeline.enter(name)
        clock(seconds)
    found = timeline.phases()
    assert {name: phase.seconds for name, phase in found.items()} == {
        "encode": 0, "rollout": 7, "decode": 2, "rewards": 0, "training": 5,
    }  # fmt: skip
    clock(100)  # after them
    assert timeline.phases()["training"].seconds == 5


def test_forwards_are_those_of_the_network_and_of_its_phase(clock):
    class Slow(nn.Module):
        def forward(self, x):
            clock(3)
            return x

    network, other = Slow(), Slow()
    timeline = Timeline(CPU)
    with timeline.forwards_of(network):
        network(0)  # in no phase
        timeline.enter("rollout")
        network(0)
        network(0)
        other(0)
        timeline.enter("training")
        network(0)
    network(0)  # no longer watched
    found = timeline.phases()
    assert (found["rollout"].forwards, found["rollout"].forward_seconds) == (2, 6)
    assert found["rollout"].seconds == 9
    assert (found["training"].forwards, found["training"].forward_seconds) == (1, 3)
    assert found["training"].seconds == 6


def test_a_cpu_has_no_peak(clock):
    timeline = Timeline(CPU)
    timeline.enter("rollout")
    assert {phase.peak for phase in timeline.phases().values()} == {None}


def test_the_loop_is_training_s_own(make_learner):
    """Two iterations with their updates, of which the second is told apart."""
    learner = make_learner(optim={"updates_per_rollout": 2, "ratio_tolerance": 100.0})
    before = [p.clone() for p in learner.policy.parameters()]
    phases, velocities = measure(learner)
    r = {"pictures": 8, "steps": 4, "batch": 8}
    assert learner.policy.updates == 4
    assert not all(map(torch.equal, before, learner.policy.parameters()))
    assert velocities == r["pictures"] * r["steps"]
    assert phases["rollout"].forwards == r["steps"]
    # All steps but the last are learned from, 4 pictures an update, in micro-batches of 8.
    assert phases["training"].forwards == 2 * 2
    assert tuple(phases) == PHASES
    for name in ("rollout", "decode", "training"):
        assert 0 <= phases[name].forward_seconds < phases[name].seconds
    assert phases["decode"].forwards == phases["rewards"].forwards == 0

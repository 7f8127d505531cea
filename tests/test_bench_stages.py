"""How two stages are measured; that measuring changes nothing that is drawn."""

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from flowrl.bench.two_stage import Clock, Watch, best_parts, clocked, full_batch, on_gpu
from flowrl.sampling.rollout import Stopwatch

CPU = torch.device("cpu")
ROLLOUT = {"prompts": 2, "group_size": 2, "steps": 3, "batch_size": 2, "tree": {"kind": "ode"}}


@pytest.mark.parametrize(
    ("most", "counts", "size"),
    [(24, (96, 24), 24), (8, (128, 16), 8), (24, (128, 16), 16), (5, (96, 24), 4), (9, (7,), 7)],
)
def test_batches_are_as_large_as_all_can_be_full_of(most, counts, size):
    assert full_batch(most, *counts) == size
    assert all(count % size == 0 for count in counts)


def test_the_parts_of_a_whole_are_those_of_its_best_round():
    found = iter([(9.0, 9.0), (1.0, 5.0), (2.0, 2.0), (0.5, 6.0)])

    def job() -> dict[str, float]:
        a, b = next(found)
        return {"a": a, "b": b, "total": a + b}

    assert best_parts({"job": job}, 3) == {"job": {"a": 2.0, "b": 2.0, "total": 4.0}}


def test_parts_without_a_whole_are_each_the_best_and_the_first_round_does_not_count():
    found = iter([(0.1, 0.1), (1.0, 5.0), (2.0, 2.0)])
    best = best_parts({"job": lambda: dict(zip("ab", next(found), strict=True))}, 2)
    assert best == {"job": {"a": 1.0, "b": 2.0}}


def test_jobs_take_turns():
    order = []
    best_parts({name: lambda name=name: order.append(name) or {} for name in "ab"}, 2)
    assert "".join(order) == "ababab"


def test_a_cpus_seconds_are_its_own():
    clock = Clock(CPU)
    with clock.of("asleep"):
        time.sleep(0.05)
    assert clock.seconds["asleep"] < 0.04
    watch = Watch(clock)
    time.sleep(0.05)
    watch.lap("asleep")
    assert watch.seconds["asleep"] < 0.04


def test_a_clocked_stage_draws_the_same_pictures(make_learner):
    learner = make_learner(objective={"kind": "sft"}, rollout=ROLLOUT)
    source = learner.source
    request, plan = source.request(0, source.plan(0)), source.plan(0)
    clock = Clock(CPU)
    plain = source.stage(request, plan, Stopwatch())
    timed = clocked(source.stage, clock, "x")(request, plan, Stopwatch())
    for (tree, images), (same, alike) in zip(plain.parts, timed.parts, strict=True):
        assert torch.equal(tree.x, same.x) and torch.equal(images, alike)
    assert torch.equal(plain.reward, timed.reward)
    assert set(clock.seconds) == {"x: sync", "x: decode"}
    assert clock.seconds["x: decode"] > 0
    after = source.stage(request, plan, Stopwatch())  # and it has left the stage as it was
    assert len(clock.seconds) == 2 and torch.equal(after.reward, plain.reward)


def test_a_clocked_stage_lets_its_network_know_of_errors(make_learner):
    stage = make_learner(objective={"kind": "sft"}, rollout=ROLLOUT).source.stage
    seen = []

    @contextmanager
    def network():
        try:
            yield None
        except KeyError as error:
            seen.append(error)
            raise

    timed = clocked(replace(stage, network=network), Clock(CPU), "x")
    error = KeyError("x")
    with pytest.raises(KeyError), timed.network():
        raise error
    assert seen == [error]


def test_a_cpu_is_no_gpu():
    assert not on_gpu("cpu")
    assert on_gpu("auto") == torch.cuda.is_available()

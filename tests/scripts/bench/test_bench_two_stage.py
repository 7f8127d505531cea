"""Two stages, measured: batches, clocks, costs; only ratios are a test's business."""

from dataclasses import replace

import pytest

from scripts.bench.two_stage import (
    PUBLISHED,
    Costs,
    summary,
)

# Full images take 10 s to sample and 2 s to finish, a cheap step half as long as an exact one.
COSTS = Costs(
    device="cpu", prompts=1, counts=PUBLISHED, batch=24, single=96 * 12.0,
    two=96 * (3.0 + 2.0) + 24 * 12.0,
    split={"explore: sample": 96 * 3.0, "rest": 96 * 2.0 + 24 * 12.0}, exact_step=1.0, low_step=0.5,
    peft_step=2.0, finish=2.0, graphs=0, memory=None,
)  # fmt: skip


def test_a_run_without_overhead_costs_what_the_model_says():
    assert (COSTS.gain, COSTS.fixed) == (2.0, 0.2)
    assert COSTS.measured == pytest.approx(COSTS.predicted)
    row = COSTS.row()
    assert row["of_predicted"] == pytest.approx(1) and row["allowed"] == 1.10
    assert COSTS.to_peft == pytest.approx(COSTS.two / (96 * (10 * 2.0 + 2.0)))
    assert [part["part"] for part in row["split"]] == ["explore: sample", "rest"]
    assert [part["share"] for part in row["split"]] == pytest.approx([0.375, 0.625])


def test_ratios_are_of_the_rounds_in_the_middle_and_the_split_is_of_the_middle_round():
    """A machine that slows down for a round changes seconds of both sides, and no ratio."""
    slow = replace(COSTS, single=3 * COSTS.single, two=3 * COSTS.two, split={"slow": 1.0})
    odd = replace(COSTS, two=2 * COSTS.two, low_step=1.0)
    row = summary([odd, COSTS, slow])
    assert row["measured"] == pytest.approx(COSTS.measured) and row["q"] == COSTS.gain
    assert row["two"] == odd.two and row["rounds"] == 3  # seconds of the round in the middle
    assert [part["part"] for part in row["split"]] == ["explore: sample", "rest"]
    low, high = map(float, row["spread"].split(" to "))
    assert low == pytest.approx(COSTS.measured, abs=1e-3) and high > 1.5 * low
    other = replace(COSTS, exact_step=4.0)  # q of 8: its own round's steps alone decide
    assert summary([COSTS, other, other])["q"] == 8.0

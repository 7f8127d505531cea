"""What is told of a run of two stages; the numbers here are made up."""

import re

import pytest

from flowrl.bench.two_stage import (
    LABELS,
    PUBLISHED,
    WIDER,
    Costs,
    MeasuredCounts,
    labelled,
    own_words,
    parse_counts,
    verdict,
)
from flowrl.errors import UserError

# Full pictures take 10 s to draw and 2 s to finish, a cheap step half as long as an exact one.
COSTS = Costs(
    device="cpu",
    prompts=1,
    counts=PUBLISHED,
    batch=24,
    single=96 * 12.0,
    two=96 * (3.0 + 2.0) + 24 * 12.0,
    split={"explore: draw": 96 * 3.0, "rest": 96 * 2.0 + 24 * 12.0},
    exact_step=1.0,
    low_step=0.5,
    peft_step=2.0,
    finish=2.0,
    graphs=0,
    memory=None,
)


def test_a_run_without_overhead_costs_what_the_model_says():
    assert (COSTS.gain, COSTS.fixed) == (2.0, 0.2)
    assert COSTS.measured == pytest.approx(COSTS.predicted)
    assert COSTS.row()["of_predicted"] == pytest.approx(1)
    assert COSTS.row()["allowed"] == 1.10


def test_the_published_baseline_is_slower_by_its_steps():
    assert COSTS.to_peft == pytest.approx(COSTS.two / (96 * (10 * 2.0 + 2.0)))


def test_the_parts_are_told_with_their_shares():
    parts = COSTS.row()["split"]
    assert [part["part"] for part in parts] == ["explore: draw", "rest"]
    assert sum(part["share"] for part in parts) == pytest.approx(1)


@pytest.mark.parametrize("counts", [PUBLISHED, WIDER])
def test_counts_are_read_as_they_are_written(counts):
    assert parse_counts(str(counts)) == counts


@pytest.mark.parametrize("text", ["24/96", "24/96@6", "24@6/10", "a/96@6/10", "24/96@6/10/2", ""])
def test_counts_of_another_form_are_refused_with_an_example(text):
    with pytest.raises(UserError, match="such as 24/96@6/10"):
        parse_counts(text)


@pytest.mark.parametrize("text", ["97/96@6/10", "0/96@6/10", "24/96@0/10", "24/96@6/0"])
def test_counts_that_cannot_be_are_refused(text):
    with pytest.raises(UserError, match=r"keep is|steps are"):
        parse_counts(text)


@pytest.mark.parametrize("text", ["24/96@11/10", "24/96@1/10"])
def test_candidates_take_two_steps_to_all(text):
    with pytest.raises(UserError, match=f"{text} draw .* expected 2 to the 10 of a kept picture"):
        parse_counts(text)


def test_names_of_numbers_are_plain_for_programs_and_all_said_to_people():
    row = COSTS.row()
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in row)
    assert set(row) - set(LABELS) == {"split", "of_predicted", "allowed"}
    told = {line["what"]: line["is"] for line in labelled(row)}
    assert told["q: low-bit speed factor"] == 2 and told["two stages, s"] == COSTS.two


def test_the_verdict_says_on_which_side_of_the_limit_the_run_is():
    row = {"measured": 1.13, "predicted": 1.0, "of_predicted": 1.13, "allowed": 1.1}
    assert verdict(row) == "measured 1.130, predicted 1.000: 1.13 times, above 1.10"
    assert verdict(COSTS.row()).endswith("1.00 times, within 1.10")


def test_a_bench_names_its_own_option_where_no_layer_is_left():
    with pytest.raises(UserError, match="is left to be quantised: give --min-dim 0"), own_words():
        raise UserError("no layer of X is left to be quantised: set rollout.explore.min_dim")
    with pytest.raises(UserError, match="^another$"), own_words():
        raise UserError("another")


def test_scaled_counts_keep_their_proportion():
    assert PUBLISHED.scaled(0.25) == MeasuredCounts(
        keep=6, candidates=24, preview_steps=6, steps=10
    )
    assert PUBLISHED.scaled(0.125).ratio(2.0, 0.2) == PUBLISHED.ratio(2.0, 0.2)
    for factor in (0.1, 0.01, 0.0):
        with pytest.raises(UserError, match="whole numbers are expected"):
            PUBLISHED.scaled(factor)

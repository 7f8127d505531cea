"""Two stages, measured: batches, clocks, costs; only ratios are a test's business."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from flowrl.errors import UserError
from flowrl.planning.model_specs import MODEL_SPECS
from flowrl.sampling.rollout import Timer
from scripts.bench.cost import two_stage_ratio
from scripts.bench.timing import (
    TimedTurn,
    TimedTurns,
    Timeline,
    compare_turns,
    in_turns,
    middle_mean,
    watched,
)
from scripts.bench.two_stage import (
    PUBLISHED,
    WIDER,
    Costs,
    MeasuredCounts,
    bench_sizes,
    bench_solrl,
    full_batch,
    name_own_options,
    parse_counts,
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


def test_counts_are_read_as_they_are_written_and_refused_where_they_cannot_be():
    for counts in (PUBLISHED, WIDER):
        assert parse_counts(str(counts)) == counts
    for words, texts in (
        ("such as 24/96@6/10", ["24/96", "24/96@6", "24@6/10", "a/96@6/10", "24/96@6/10/2", ""]),
        ("keep is|steps are", ["97/96@6/10", "0/96@6/10", "24/96@0/10", "24/96@6/0"]),
        ("expected 2 to the 10", ["24/96@11/10", "24/96@1/10"]),
    ):
        for text in texts:
            with pytest.raises(UserError, match=words):
                parse_counts(text)


def test_scaled_counts_keep_their_proportion():
    assert PUBLISHED.scaled(0.25) == MeasuredCounts(
        keep=6, candidates=24, preview_steps=6, steps=10
    )
    assert PUBLISHED.scaled(0.125).ratio(2.0, 0.2) == PUBLISHED.ratio(2.0, 0.2)
    for factor in (0.1, 0.01, 0.0):
        with pytest.raises(UserError, match="whole numbers are expected"):
            PUBLISHED.scaled(factor)


def test_a_bench_names_its_own_option_where_no_layer_is_left():
    with (
        pytest.raises(UserError, match="is left to be quantised: give --min-dim 0"),
        name_own_options(),
    ):
        raise UserError("no layer of X is left to be quantised: set rollout.explore.min_dim")
    with pytest.raises(UserError, match="^another$"), name_own_options():
        raise UserError("another")


CPU = torch.device("cpu")
ROLLOUT = {"prompts_per_iteration": 2, "group_size": 2, "num_inference_steps": 3} | {
    "batch_size": 2, "tree": {"kind": "ode"}
}  # fmt: skip


def test_batches_are_as_large_as_all_can_be_full_of():
    for most, counts, size in [
        (24, (96, 24), 24), (8, (128, 16), 8), (24, (128, 16), 16), (5, (96, 24), 4), (9, (7,), 7)
    ]:  # fmt: skip
        assert full_batch(most, *counts) == size, (most, counts)


def test_jobs_take_turns_there_and_back_and_the_first_round_does_not_count():
    order = []
    rounds = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert "".join(order) == "abbaab" and {n: len(r) for n, r in rounds.items()} == {"a": 2, "b": 2}


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


def test_the_outer_quarters_of_rounds_do_not_count():
    for values, mean in (
        ([5.0], 5.0), ([1.0, 3.0], 2.0), ([9.0, 1.0, 2.0], 2.0), ([1.0, 2.0, 4.0, 99.0], 3.0),
        ([-99.0, 0.0, 1.0, 2.0, 3.0, 4.0, 99.0], 2.0),
    ):  # fmt: skip
        assert middle_mean(values) == mean


def test_ratios_are_of_rounds_in_the_middle_by_the_cpu_s_seconds_or_a_gpu_s_clock():
    def turns(*pairs, on_gpu=False):
        made = tuple(TimedTurn(cpu=cpu, wall=wall) for cpu, wall in pairs)
        return TimedTurns(turns=made, on_gpu=on_gpu)

    job = turns((2.0, 9.0), (3.0, 4.0), (8.0, 2.0))
    other = turns((1.0, 3.0), (1.0, 1.0), (2.0, 1.0))
    row = compare_turns(job, other)
    assert (row["seconds"], row["ratio"], row["wall ratio"]) == (3.0, 3.0, 3.0)
    assert row["spread"] == "2.000 to 4.000" and row["wall seconds"] == 4.0
    gpu = [replace(both, on_gpu=True) for both in (job, other)]
    assert compare_turns(*gpu)["seconds"] == 4.0
    assert compare_turns(turns((3.0, 1.0)), turns((2.0, 1.0)))["ratio"] == 1.5


NAMES = {part: f"x: {part}" for part in ("sync", "sample", "decode", "reward")}


def scores_of(generator, request, plan):
    return generator.score(generator.sample(request, plan, Timer()), Timer())


def test_a_watched_generator_makes_the_same_images_and_its_network_learns_of_errors(make_learner):
    learner = make_learner(objective={"kind": "sft"}, rollout=ROLLOUT)
    source = learner.source
    request, plan = source.request(0, source.plan(0)), source.plan(0)
    timeline = Timeline(CPU)
    plain = scores_of(source.generator, request, plan)
    timed = scores_of(watched(source.generator, timeline, **NAMES), request, plan)
    for (tree, images), (same, alike) in zip(plain.images, timed.images, strict=True):
        assert torch.equal(tree.x, same.x) and torch.equal(images, alike)
    assert torch.equal(plain.reward, timed.reward)
    phases = timeline.phases()
    assert list(phases) == list(NAMES.values())
    assert phases["x: sample"].seconds > 0 and phases["x: decode"].seconds > 0
    after = scores_of(source.generator, request, plan)  # and it has left the other as it was
    assert timeline.phases() == phases and torch.equal(after.reward, plain.reward)
    seen = []

    @contextmanager
    def network():
        try:
            yield None
        except KeyError as error:
            seen.append(error)
            raise

    timed = watched(replace(source.generator, network=network), Timeline(CPU), **NAMES)
    error = KeyError("x")
    with pytest.raises(KeyError), timed.network():
        raise error
    assert seen == [error]


OPTIONS = {
    "prompts": 1, "precision": "nvfp4-emulated", "min_dim": 0, "batch": 24, "compile": False,
    "threads": 1, "repeats": 1, "device": "cpu", "counts": parse_counts("2/6@2/3"),
}  # fmt: skip


def test_the_split_and_the_ratio_stand_beside_the_cost_models(tiny_pipeline_path):
    row = bench_solrl(model=tiny_pipeline_path, **OPTIONS)
    assert (row["device"], row["batch"], row["recompiled"]) == ("cpu", 2, 0)
    stages, parts = ("explore", "regenerate"), ("sync", "sample", "decode", "reward")
    named = [f"{stage}: {part}" for stage in stages for part in parts]
    assert [part["part"] for part in row["split"]] == [*named, "select and other"]
    assert all(part["seconds"] > 0 for part in row["split"][:-1])
    assert sum(part["seconds"] for part in row["split"]) == pytest.approx(row["two"])
    assert row["q"] == row["exact_step"] / row["low_step"]
    assert row["phi"] == row["finish"] / (3 * row["exact_step"])
    assert row["measured"] == row["two"] / row["single"]
    assert row["predicted"] == two_stage_ratio(
        candidates=6, keep=2, preview_steps=2, steps=3, gain=row["q"], fixed=row["phi"]
    )
    assert row["of_predicted"] == row["measured"] / row["predicted"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "nvfp4-emulated"])
def test_the_measured_ratio_is_at_most_a_tenth_above_the_models(tiny_pipeline_path, precision):
    options = OPTIONS | {"precision": precision, "repeats": 3, "counts": PUBLISHED}
    row = bench_solrl(model=tiny_pipeline_path, **options)
    assert row["of_predicted"] <= row["allowed"]


NAME = "sd3.5-large"
SIZED = {
    "name": NAME, "plans": [parse_counts("2/4@2/3"), parse_counts("1/2@2/2")], "prompts": 1,
    "batch": 8, "decode_batch": 2, "pixels": 32, "layers": 2, "min_dim": 0, "compile": False,
    "repeats": 1, "device": "cpu",
}  # fmt: skip


@pytest.mark.slow
def test_a_row_a_plan_tells_what_was_quantised_and_what_it_cost(monkeypatch, tiny_size):
    monkeypatch.setitem(MODEL_SPECS, NAME, tiny_size(NAME))
    rows = bench_sizes(precision="nvfp4-emulated", **SIZED)
    assert [row["plan"] for row in rows] == ["2/4@2/3", "1/2@2/2"]
    for row in rows:
        assert (row["precision"], row["native"], row["device"]) == ("nvfp4-emulated", False, "cpu")
        assert row["layers"] == "2 of each kind: says nothing of speed"
        # Eight projections of attention a block, one less in the last, two of the image's
        # feed-forward, and the last projection of all.
        assert row["quantised_layers"] == 8 + 7 + 2 * 2 + 1
        assert 0 < row["quantised_share"] < 1
        assert row["recompiled"] == 0 and row["peak_memory_gb"] is None
        assert row["of_predicted"] == row["measured"] / row["predicted"] > 0
        json.dumps(row)
    row, *_ = bench_sizes(precision="bf16", **SIZED)
    assert row["quantised_layers"] == 0 and row["precision"] == "bf16"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sd3.5-large", "flux.1-dev", "sana-1.6b"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="fp8 needs compute capability 8.9",
)
def test_real_sizes_cost_what_the_model_says_and_compile_once(name):
    options = SIZED | {"name": name, "pixels": None, "layers": None, "min_dim": None}
    options |= {"plans": [PUBLISHED, WIDER], "compile": True, "device": "cuda", "repeats": 2}
    for row in bench_sizes(precision="fp8", **options):
        assert row["recompiled"] == 0
        assert row["of_predicted"] <= row["allowed"]

"""What `flowrl bench solrl` measures on a pipeline; only the ratios are a test's business."""

import pytest

from flowrl.bench.two_stage import PUBLISHED, bench_solrl, parse_counts
from flowrl.errors import UserError
from flowrl.sampling.two_stage import two_stage_ratio

PARTS = [
    f"{stage}: {part}"
    for stage in ("explore", "regenerate")
    for part in ("sync", "draw", "decode", "reward")
]
OPTIONS = {
    "prompts": 1,
    "precision": "nvfp4-emulated",
    "min_dim": 0,
    "batch": 24,
    "compile": False,
    "threads": 1,
    "repeats": 1,
    "device": "cpu",
}


def test_the_split_and_the_ratio_stand_beside_the_cost_models(tiny_pipeline_path):
    row = bench_solrl(model=tiny_pipeline_path, counts=parse_counts("2/6@2/3"), **OPTIONS)
    assert (row["device"], row["batch"], row["recompiled"]) == ("cpu", 2, 0)
    assert [part["part"] for part in row["split"]] == [*PARTS, "select and other"]
    assert all(part["seconds"] > 0 for part in row["split"][:-1])
    assert sum(part["seconds"] for part in row["split"]) == pytest.approx(row["two"])
    assert row["q"] == row["exact_step"] / row["low_step"]
    assert row["phi"] == row["finish"] / (3 * row["exact_step"])
    assert row["measured"] == row["two"] / row["single"]
    assert row["predicted"] == two_stage_ratio(
        candidates=6, keep=2, preview_steps=2, steps=3, gain=row["q"], fixed=row["phi"]
    )
    assert row["of_predicted"] == row["measured"] / row["predicted"]


@pytest.mark.parametrize("precision", ["nvfp4", "fp8"])
def test_a_precision_that_a_cpu_lacks_is_refused(tiny_pipeline_path, precision):
    with pytest.raises(UserError, match="nvfp4-emulated"):
        bench_solrl(
            model=tiny_pipeline_path,
            counts=parse_counts("2/6@2/3"),
            **OPTIONS | {"precision": precision},
        )


@pytest.mark.parametrize(
    ("counts", "changed", "told"),
    [
        ("1/4@2/3", {}, "1/4@2/3 keep one picture"),
        ("2/4@2/3", {"precision": "fp4"}, "unknown precision 'fp4': one of auto"),
        ("2/4@2/3", {"min_dim": None}, "left to be quantised: give --min-dim 0"),
    ],
    ids=["one kept", "precision", "no layer"],
)
def test_refusals_speak_of_the_benchs_own_options(tiny_pipeline_path, counts, changed, told):
    with pytest.raises(UserError, match=told) as caught:
        bench_solrl(model=tiny_pipeline_path, counts=parse_counts(counts), **OPTIONS | changed)
    assert "rollout." not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "nvfp4-emulated"])
def test_the_measured_ratio_is_at_most_a_tenth_above_the_models(tiny_pipeline_path, precision):
    options = OPTIONS | {"precision": precision, "repeats": 3}
    row = bench_solrl(model=tiny_pipeline_path, counts=PUBLISHED, **options)
    assert row["of_predicted"] <= row["allowed"]

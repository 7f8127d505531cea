"""Two stages on networks of published make, tiny ones here; only a GPU can tell their speed."""

import json
from dataclasses import replace

import pytest
import torch

from flowrl.bench.two_stage import PUBLISHED, WIDER, bench_sizes, parse_counts
from flowrl.errors import UserError
from flowrl.planning.model_specs import SIZES

NAME = "sd3.5-large"
OPTIONS = {
    "name": NAME,
    "plans": [parse_counts("2/4@2/3"), parse_counts("1/2@2/2")],
    "prompts": 1,
    "batch": 8,
    "decode_batch": 2,
    "pixels": 32,
    "layers": 2,
    "min_dim": 0,
    "compile": False,
    "repeats": 1,
    "device": "cpu",
}


@pytest.fixture
def narrow(monkeypatch):
    """The network's make, a hundredth of its width."""
    size = SIZES[NAME]
    config = dict(size.config) | {"num_attention_heads": 2, "attention_head_dim": 32}
    config |= {"caption_projection_dim": 64, "joint_attention_dim": 64, "pos_embed_max_size": 8}
    decoder = dict(size.autoencoder_config) | {
        "block_out_channels": (8, 8, 8, 8),
        "norm_num_groups": 4,
    }
    changed = replace(size, config=config, autoencoder_config=decoder, text_tokens=5, text_width=64)
    monkeypatch.setitem(SIZES, NAME, changed)


def test_a_row_a_plan_tells_what_was_quantised_and_what_it_cost(narrow):
    rows = bench_sizes(precision="nvfp4-emulated", **OPTIONS)
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


def test_bf16_quantises_nothing(narrow):
    row, *_ = bench_sizes(precision="bf16", **OPTIONS)
    assert row["quantised_layers"] == 0 and row["precision"] == "bf16"


def test_a_cpu_is_not_asked_for_a_whole_network():
    with pytest.raises(UserError, match="give --layers 2"):
        bench_sizes(precision="auto", **OPTIONS | {"layers": None})


def test_an_unknown_size_is_told_the_known_ones_before_anything_else():
    with pytest.raises(UserError, match="'nosuch', expected one of sd3.5-large, sd3.5-medium"):
        bench_sizes(precision="auto", **OPTIONS | {"name": "nosuch", "layers": None})


def test_a_precision_that_a_cpu_lacks_is_refused_before_anything_is_built():
    with pytest.raises(UserError, match="nvfp4-emulated"):
        bench_sizes(precision="fp8", **OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sd3.5-large", "flux.1-dev", "sana-1.6b"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="fp8 needs compute capability 8.9",
)
def test_real_sizes_cost_what_the_model_says_and_compile_once(name):
    """Not run on such a device yet."""
    options = OPTIONS | {"name": name, "pixels": None, "layers": None, "min_dim": None}
    options |= {"plans": [PUBLISHED, WIDER], "compile": True, "device": "cuda", "repeats": 2}
    for row in bench_sizes(precision="fp8", **options):
        assert row["recompiled"] == 0
        assert row["of_predicted"] <= row["allowed"]

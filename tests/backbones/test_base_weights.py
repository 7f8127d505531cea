"""Frozen weights in few bits: smaller, close, below adapters that train; and what is refused."""

import importlib.util

import pytest
import torch
from torch import nn

from flowrl.assembly.backbone import build_pipeline
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones import quantized_base as base_weights
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.quantized_base import (
    check_base_bits,
    is_plain,
    is_quantised,
    loading_config,
)
from flowrl.backbones.text_cache import TextCache
from flowrl.config.sections import MemoryOptions
from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts
from flowrl.quantization.rollout_model import RolloutModel
from flowrl.utils.distributed import Runtime

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EIGHT = {"base_bits": 8}
INT8 = MemoryOptions(**EIGHT)


def linear_layers(network):
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def held(network):
    weights = [layer.weight.data for layer in linear_layers(network)]
    parts = [
        getattr(weight, name) if name else weight
        for weight in weights
        for name in getattr(weight, "tensor_data_names", [""])
    ]
    return sum(part.numel() * part.element_size() for part in parts)


@needs_torchao
def test_weights_rounded_while_loading_take_half_of_bf16_and_compute_nearly_the_same():
    for family in ["sd3", "flux", "sana"]:
        load = {"dtype": "bf16", "device": "cpu"}
        exact = load_pipeline(f"tiny-{family}", **load)
        rounded = load_pipeline(
            f"tiny-{family}", **load, rounding=loading_config(INT8, torch.bfloat16)
        )
        assert is_quantised(rounded.transformer) and not is_quantised(exact.transformer)
        assert held(rounded.transformer) < 0.56 * held(exact.transformer)
        assert all(not is_plain(layer.weight) for layer in linear_layers(rounded.transformer))
        fields = [
            PipelineBackbone(p, guidance=3.5, max_sequence_length=12) for p in (exact, rounded)
        ]
        x = torch.randn(2, *fields[0].latent_shape(), generator=torch.Generator().manual_seed(0))
        cond = TextCache(fields[0])(load_prompts("tiny:all:train", limit=2))
        with torch.no_grad():
            a, b = (f.velocity(x.bfloat16(), torch.tensor(0.6), cond).float() for f in fields)
        assert 0 <= (a - b).norm() < 0.1 * a.norm()


@pytest.fixture(scope="module")
def learner(tiny_config):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    return build_learner(tiny_config(memory=EIGHT), Runtime(device="cpu"), ProvidedObjects())


def test_adapters_above_rounded_weights_stay_exact_and_train(learner):
    policy = learner.policy
    before = [p.clone() for p in policy.parameters()]
    base = [
        layer.weight.data for layer in linear_layers(policy.network) if not is_plain(layer.weight)
    ]
    kept = [weight.dequantize().clone() for weight in base]
    learner.iterate(0)
    assert all(p.dtype == torch.float32 for p in before)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(torch.equal(w.dequantize(), k) for w, k in zip(base, kept, strict=True)) and base


def test_nothing_is_folded_into_rounded_weights(learner, tiny_config):
    config = tiny_config(rollout={"merge_lora": True})
    provided = load_pipeline(
        config.pipeline.path,
        dtype="fp32",
        device="cpu",
        rounding=loading_config(INT8, torch.float32),
    )
    with pytest.raises(UserError, match="cannot be folded into weights of 8 or 4 bits"):
        build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=provided))
    layers = [m for m in learner.policy.network.modules() if hasattr(m, "base_layer")]
    before = [layer.base_layer.weight.data.qdata for layer in layers]
    with pytest.raises(UserError, match="cannot be folded"):
        RolloutModel(learner.policy)
    after = [layer.base_layer.weight.data.qdata for layer in layers]
    assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@needs_torchao
def test_a_pipeline_that_is_loaded_already_is_refused_unless_it_is_rounded(tiny_config, load_tiny):
    with pytest.raises(UserError, match="memory.base_bits rounds weights as they load"):
        build_pipeline(tiny_config(memory=EIGHT), CPU, load_tiny())


def test_bitsandbytes_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(base_weights.importlib.util, "find_spec", lambda name: object())
    check_base_bits(MemoryOptions(base_bits=4), CUDA)
    check_base_bits(INT8, CPU)
    with pytest.raises(UserError, match="GPUs alone: on the CPU set it to 8"):
        check_base_bits(MemoryOptions(base_bits=4), CPU)

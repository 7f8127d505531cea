import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_sizes import TARGETS, setup, small

from flowrl.errors import UserError
from flowrl.planning.activations import (
    adapter_parameters,
    add_adapter,
    as_module,
    build,
    depths,
    nbytes,
    of_depths,
)
from flowrl.planning.memory import (
    BACKENDS,
    Copy,
    adapted_bytes,
    copy_bytes,
    few_bits_bytes,
    linear_layers,
    network_of,
    packed_layers,
    transformer_bytes,
)
from flowrl.planning.model_specs import SIZES
from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated

NAMES = ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]


@pytest.mark.parametrize("name", SIZES)
def test_the_weights_of_a_published_network_are_its_numbers_times_two_bytes(name):
    size = SIZES[name]
    network = build(as_module(size.transformer, size.config), torch.bfloat16)
    found = transformer_bytes(network, setup(name))
    assert found == 2 * sum(t.numel() for t in (*network.parameters(), *network.buffers()))
    assert found / 2e9 == pytest.approx(size.billions, abs=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_has_as_many_numbers_as_pefts(name):
    size = small(name)
    network = build(as_module(size.transformer, size.config), torch.bfloat16)
    expected = adapter_parameters(network, 4, TARGETS[size.family])
    added = add_adapter(network, 4, TARGETS[size.family])
    assert sum(p.numel() for p in added) == expected > 0
    assert {p.dtype for p in added} == {torch.float32}


def test_a_lora_of_sd35_large_has_its_closed_form():
    """38 blocks of width 2432: 8 square layers each, but for the last one's last."""
    size = SIZES["sd3.5-large"]
    network = build(as_module(size.transformer, size.config), torch.bfloat16)
    layers = 38 * 8 - 1
    assert adapter_parameters(network, 32, TARGETS["sd3"]) == 32 * layers * 2 * 2432


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_blocks_can_be_changed_kind_by_kind(name):
    size = small(name)
    module = as_module(size.transformer, size.config)
    assert depths(of_depths(module, depths(module))) == depths(module)
    two = of_depths(module, dict.fromkeys(depths(module), 2))
    assert set(depths(two).values()) == {2}


@pytest.mark.parametrize(
    ("bits", "library", "expected"),
    [
        (8, "bitsandbytes", 64 * 128 + 64 * 4),
        (8, "torchao", 64 * 128 + 64 * 2),
        (4, "bitsandbytes", 64 * 128 // 2 + 64 * 128 // 64 * 4),
    ],
)
def test_few_bits_have_codes_and_scales(bits, library, expected):
    assert few_bits_bytes(64, 128, bits, library) == expected


@given(st.sampled_from(NAMES), st.sampled_from([4, 8]))
def test_a_base_in_few_bits_changes_linear_layers_alone(name, bits):
    network = network_of(small(name), setup(name))
    exact = transformer_bytes(network, setup(name))
    packed = transformer_bytes(network, setup(name, base_bits=bits))
    linear = sum(layer.weight.numel() for layer in linear_layers(network))
    scales = packed - (exact - 2 * linear + linear * bits // 8)
    assert 0 < scales <= linear // 4
    assert packed < exact


def test_torchao_has_no_base_of_4_bits():
    with pytest.raises(UserError, match="torchao"):
        setup("flux.1-dev", base_bits=4, base_library="torchao")


@pytest.mark.parametrize("backend", [FP8Rowwise(), NVFP4Emulated()])
def test_packed_weights_are_as_large_as_their_backend_packs_them(backend):
    weight = torch.randn(64, 96)
    real = nbytes(backend.pack(weight).values())
    assert real == nbytes(backend.pack(weight.to("meta")).values())


def test_native_nvfp4_takes_half_a_byte_a_weight_and_one_for_16():
    packed = nbytes(BACKENDS["nvfp4"].pack(torch.empty(256, 256, device="meta")).values())
    assert packed == 256 * 256 // 2 + 256 * 256 // 16 + 4


def test_a_copy_that_is_not_quantised_holds_the_adapted_weights_alone():
    name = "flux.1-dev"
    network = network_of(small(name), setup(name))
    exact = Copy(format="bf16")
    assert copy_bytes(network, exact, setup(name)) == adapted_bytes(network, setup(name)) > 0


def test_a_copy_with_the_adapter_beside_it_holds_a_second_adapter():
    name = "flux.1-dev"
    network = network_of(small(name), setup(name))
    numbers = adapter_parameters(network, 4, TARGETS["flux"])
    beside = Copy(format="bf16", merge=False)
    assert copy_bytes(network, beside, setup(name)) == 4 * numbers


def test_layers_that_are_packed_are_not_held_again_in_full():
    name = "flux.1-dev"
    network = network_of(small(name), setup(name))
    cheap = Copy(format="fp8", min_dim=0)
    packed = packed_layers(network, cheap)
    kept = adapted_bytes(network, setup(name)) - 2 * sum(
        layer.weight.numel()
        for key, layer in network.named_modules()
        if key in packed and key.endswith(tuple(TARGETS["flux"]))
    )
    assert copy_bytes(network, cheap, setup(name)) == sum(packed.values()) + kept


def test_a_precision_that_the_gpu_decides_is_the_larger():
    name = "flux.1-dev"
    network = network_of(small(name), setup(name))
    for merge in (True, False):
        fp8, bf16, auto = (
            copy_bytes(network, Copy(format=format, merge=merge, min_dim=0), setup(name))
            for format in ("fp8", "bf16", "auto")
        )
        assert auto == max(fp8, bf16) > 0

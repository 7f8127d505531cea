import pytest
import torch
from small_sizes import TARGETS, setup, small

from flowrl.errors import UserError
from flowrl.planning.activations import add_adapter, block_counts, nbytes, with_block_counts
from flowrl.planning.memory import (
    BACKENDS,
    NetworkCopy,
    adapted_bytes,
    adapter_parameters,
    copy_bytes,
    few_bits_bytes,
    full_network,
    linear_layers,
    packed_layers,
    transformer_bytes,
)
from flowrl.planning.model_specs import MODEL_SPECS, build_network
from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated

NAMES = ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
FLUX = setup("flux.1-dev")


@pytest.fixture(scope="module")
def network():
    return full_network(small("flux.1-dev"), torch.bfloat16)


def test_the_weights_of_a_published_network_are_its_numbers_times_two_bytes():
    for name in MODEL_SPECS:
        size = MODEL_SPECS[name]
        network = build_network(size.transformer, size.config, torch.bfloat16)
        found = transformer_bytes(network, setup(name))
        assert found == 2 * sum(t.numel() for t in (*network.parameters(), *network.buffers()))


def test_the_adapter_has_as_many_numbers_as_pefts_whatever_the_number_of_blocks():
    for name in NAMES:
        size = small(name)
        network = build_network(size.transformer, size.config, torch.bfloat16)
        expected = adapter_parameters(network, 4, TARGETS[size.family])
        added = add_adapter(network, 4, TARGETS[size.family])
        assert sum(p.numel() for p in added) == expected > 0
        assert {p.dtype for p in added} == {torch.float32}
        counts = block_counts(size.config)
        assert block_counts(with_block_counts(size.config, counts)) == counts
        two = with_block_counts(size.config, dict.fromkeys(counts, 2))
        assert set(block_counts(two).values()) == {2}


def test_a_lora_of_sd35_large_has_its_closed_form():
    """38 blocks of width 2432: 8 square layers each, but for the last one's last."""
    size = MODEL_SPECS["sd3.5-large"]
    network = build_network(size.transformer, size.config, torch.bfloat16)
    layers = 38 * 8 - 1
    assert adapter_parameters(network, 32, TARGETS["sd3"]) == 32 * layers * 2 * 2432


def test_few_bits_have_codes_and_scales():
    for bits, library, expected in [
        (8, "bitsandbytes", 64 * 128 + 64 * 4),
        (8, "torchao", 64 * 128 + 64 * 2),
        (4, "bitsandbytes", 64 * 128 // 2 + 64 * 128 // 64 * 4),
    ]:
        assert few_bits_bytes(64, 128, bits, library) == expected


def test_a_base_in_few_bits_changes_linear_layers_alone():
    for name in NAMES:
        network = full_network(small(name), torch.bfloat16)
        exact = transformer_bytes(network, setup(name))
        linear = sum(layer.weight.numel() for layer in linear_layers(network))
        for bits in (4, 8):
            packed = transformer_bytes(network, setup(name, base_bits=bits))
            scales = packed - (exact - 2 * linear + linear * bits // 8)
            assert 0 < scales <= linear // 4 and packed < exact, (name, bits)
    with pytest.raises(UserError, match="torchao"):
        setup("flux.1-dev", base_bits=4, base_library="torchao")


def test_packed_weights_are_as_large_as_their_backend_packs_them():
    weight = torch.randn(64, 96)
    for backend in (FP8Rowwise(), NVFP4Emulated()):
        real = nbytes(backend.pack(weight).values())
        assert real == nbytes(backend.pack(weight.to("meta")).values())
    packed = nbytes(BACKENDS["nvfp4"].pack(torch.empty(256, 256, device="meta")).values())
    assert packed == 256 * 256 // 2 + 256 * 256 // 16 + 4


def test_a_copy_that_is_not_quantised_holds_the_adapted_weights_or_a_second_adapter(network):
    exact, beside = NetworkCopy(format="bf16"), NetworkCopy(format="bf16", merge=False)
    assert copy_bytes(network, exact, FLUX) == adapted_bytes(network, FLUX) > 0
    numbers = adapter_parameters(network, 4, TARGETS["flux"])
    assert copy_bytes(network, beside, FLUX) == 4 * numbers


def test_layers_that_are_packed_are_not_held_again_in_full(network):
    cheap = NetworkCopy(format="fp8", min_dim=0)
    packed = packed_layers(network, cheap)
    kept = adapted_bytes(network, FLUX) - 2 * sum(
        layer.weight.numel()
        for key, layer in network.named_modules()
        if key in packed and key.endswith(tuple(TARGETS["flux"]))
    )
    assert copy_bytes(network, cheap, FLUX) == sum(packed.values()) + kept


def test_a_precision_that_the_gpu_decides_is_the_larger(network):
    for merge in (True, False):
        fp8, bf16, auto = (
            copy_bytes(network, NetworkCopy(format=format, merge=merge, min_dim=0), FLUX)
            for format in ("fp8", "bf16", "auto")
        )
        assert auto == max(fp8, bf16) > 0

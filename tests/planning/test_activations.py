"""Activations of shortened networks, against torch's memory tracker over every block."""

from dataclasses import replace

import diffusers
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils._pytree import tree_leaves

from flowrl.backbones.families import family_of, lora_targets
from flowrl.backbones.loading import enable_gradient_checkpointing
from flowrl.backbones.small import small_folder
from flowrl.planning import activations
from flowrl.planning.activations import (
    Forward,
    count_decode,
    count_forward,
    network_inputs,
    transformer_peak,
)
from flowrl.planning.model_specs import MODEL_SPECS, build_network, spec_for


def forward_of(spec, **changes) -> Forward:
    network = build_network(spec.transformer, spec.config, torch.bfloat16)
    targets = lora_targets(family_of(spec.pipeline), network)
    options = {
        "rows": 2, "height": 64, "width": 64, "text_tokens": 32, "dtype": torch.bfloat16,
        "rank": 4, "targets": targets,
    }  # fmt: skip
    return Forward(spec=spec, **(options | changes))


class Tracker(MemTracker):
    """torch's memory tracker of the whole, without its tables for each module.

    They need gradients of all parameters, and at each operation a walk over all modules.
    """

    def _pre_fw_hook(self, module, inputs): ...
    def _post_fw_hook(self, module, inputs, outputs): ...
    def _pre_bw_hook(self, module, args): ...
    def _post_bw_hook(self, module, args): ...


def tracked_peak(forward: Forward, checkpointing: bool) -> int:
    """Return the activations' peak by torch's memory tracker, over a forward and a backward."""
    spec = forward.spec
    network = build_network(spec.transformer, spec.config, forward.dtype)
    activations.add_adapter(network, forward.rank, forward.targets)
    if checkpointing:
        enable_gradient_checkpointing(network)
    with activations.fake_tensors(forward.dtype):
        activations.make_fake(network)
        inputs = {key: activations._fake(v) for key, v in network_inputs(forward).items()}
        for parameter in (p for p in network.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tracker = Tracker()
        tracker.track_external(network, *(t for t in tree_leaves(inputs) if torch.is_tensor(t)))
        with tracker:
            output = [t for t in tree_leaves(network(**inputs)) if torch.is_tensor(t)]
            torch.autograd.backward(output, [torch.empty_like(t) for t in output])
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return sum(peak[kind] for kind in (_MemRefType.ACT, _MemRefType.TEMP))


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    folder = small_folder(diffusers.Flux2KleinPipeline, tmp_path_factory.mktemp("klein"))
    spec = spec_for(str(folder))
    return replace(spec, config=spec.config | {"num_layers": 3, "num_single_layers": 4})


def test_peaks_are_those_of_the_memory_tracker(klein):
    forward = forward_of(klein, height=128, width=128)
    counted = transformer_peak(forward, "train", checkpointing=True)
    assert counted == pytest.approx(tracked_peak(forward, True), rel=0.1)


def test_two_blocks_of_a_kind_count_the_operations_of_all(klein, monkeypatch):
    forward = forward_of(klein)
    short = count_forward.__wrapped__(forward, gradients=False)
    monkeypatch.setattr(activations, "shorten", lambda network: {})
    assert count_forward.__wrapped__(forward, gradients=False).operations == short.operations


def test_attention_counts_its_two_products_and_a_product_of_matrices_its_one():
    rows, heads, tokens, width = 2, 3, 5, 8
    with activations.fake_tensors(torch.float32):
        q = torch.empty(rows, heads, tokens, width)
        with activations.LiveBytes([q]) as counter:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        attention, both = counter.operations, 2 * tokens * tokens * width
        with activations.LiveBytes([q]) as counter:
            q @ q.mT
    assert counter.operations == rows * heads * both and attention == 2 * counter.operations


def test_peaks_are_ordered_and_those_of_decoding_grow_with_rows(klein):
    forward = forward_of(klein)
    sample, train = (transformer_peak(forward, mode) for mode in ("sample", "train"))
    checkpointed = transformer_peak(forward, "train", checkpointing=True)
    assert 0 < sample < checkpointed < train
    once, twice = (count_decode(klein, n, 64, 64, torch.bfloat16) for n in (1, 2))
    assert twice.peak == pytest.approx(2 * once.peak, rel=0.1)
    assert twice.operations == 2 * once.operations > 0


LARGE = (
    "sd3.5-medium", "flux.1-dev", "sana-1.6b", "qwen-image", "flux.2-klein-4b", "flux.2-klein-9b",
    "z-image",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_peaks_at_1024_pixels_are_those_of_the_memory_tracker(name, checkpointing):
    forward = forward_of(MODEL_SPECS[name], rows=1, height=1024, width=1024, text_tokens=256)
    counted = transformer_peak(forward, "train", checkpointing=checkpointing)
    tracked = tracked_peak(forward, checkpointing)
    print(f"{name} checkpointing={checkpointing} {counted / 1e9:.2f} {tracked / 1e9:.2f} GB")
    assert counted == pytest.approx(tracked, rel=0.1)

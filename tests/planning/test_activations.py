"""Activations under fake tensors, against every block run, real tensors and known sizes."""

from dataclasses import replace

import diffusers
import pytest
import torch

from flowrl.backbones.families import family_of, lora_targets
from flowrl.backbones.small import small_folder
from flowrl.planning import activations
from flowrl.planning.activations import Forward, count_decode, count_forward, transformer_peak
from flowrl.planning.model_specs import MODEL_SPECS, build_network, spec_for


def forward_of(spec, **changes) -> Forward:
    network = build_network(spec.transformer, spec.config, torch.bfloat16)
    targets = lora_targets(family_of(spec.pipeline), network)
    options = {
        "rows": 2, "height": 64, "width": 64, "text_tokens": 32, "dtype": torch.bfloat16,
        "rank": 4, "targets": targets,
    }  # fmt: skip
    return Forward(spec=spec, **(options | changes))


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    folder = small_folder(diffusers.Flux2KleinPipeline, tmp_path_factory.mktemp("klein"))
    spec = spec_for(str(folder))
    return replace(spec, config=spec.config | {"num_layers": 5, "num_single_layers": 6})


def test_two_blocks_of_a_kind_stand_for_all(klein, monkeypatch):
    forward = forward_of(klein)
    short = [count_forward.__wrapped__(forward, gradients=g) for g in (True, False)]

    def every_block(network):
        lists = [m for m in network.children() if isinstance(m, torch.nn.ModuleList)]
        return {block: 1 for blocks in lists for block in blocks}

    monkeypatch.setattr(activations, "shorten", every_block)
    for expected, gradients in zip(short, (True, False), strict=True):
        whole = count_forward.__wrapped__(forward, gradients=gradients)
        assert replace(whole, working=0) == replace(expected, working=0)
        assert whole.working == pytest.approx(expected.working, rel=0.1)


def test_saved_bytes_are_those_of_a_real_forward(klein):
    """In fp32, where neither autocast nor another attention kernel changes anything."""
    forward = forward_of(klein, dtype=torch.float32)
    counted = count_forward(forward, gradients=True)
    network = build_network(klein.transformer, klein.config, torch.float32).to_empty(device="cpu")
    activations.add_adapter(network, forward.rank, forward.targets)
    network.to_empty(device="cpu")
    inputs = {
        key: torch.zeros(value.shape, dtype=value.dtype) if torch.is_tensor(value) else value
        for key, value in activations.network_inputs(forward).items()
    }
    weights = {id(p.untyped_storage()) for p in network.parameters()}
    weights |= {id(v.untyped_storage()) for v in inputs.values() if torch.is_tensor(v)}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        saved[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(**inputs)
    real = sum(s.nbytes() for key, s in saved.items() if key not in weights)
    assert output is not None and counted.saved == pytest.approx(real, rel=0.1)


def test_peaks_are_ordered_and_grow_with_rows(klein):
    forward = forward_of(klein)
    sample, train = (transformer_peak(forward, mode) for mode in ("sample", "train"))
    checkpointed = transformer_peak(forward, "train", checkpointing=True)
    assert 0 < sample < checkpointed < train
    assert transformer_peak(forward, "train_with_reference") >= train
    more = transformer_peak(replace(forward, rows=4), "train")
    assert more == pytest.approx(2 * train, rel=0.1)
    once, twice = (count_decode(klein, n, 64, 64, torch.bfloat16) for n in (1, 2))
    assert twice.working == pytest.approx(2 * once.working, rel=0.1)
    assert twice.operations == 2 * once.operations > 0


# Bytes of training and of sampling two images at 1024 px: counted before by a count of every
# operation of the backward pass, too, on the meta device with emulated autocast.
BEFORE = {
    "sd3.5-medium": (17.8e9, 0.431e9),
    "sd3.5-large": (34.6e9, 0.606e9),
    "sana-1.6b": (7.0e9, 0.26e9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE)
def test_counts_agree_with_those_of_a_whole_backward_pass(name):
    spec = MODEL_SPECS[name]
    sizes = {"height": 1024, "width": 1024, "text_tokens": 300 if "sana" in name else 256}
    forward = forward_of(spec, rank=32, **sizes)
    assert transformer_peak(forward, "train") == pytest.approx(BEFORE[name][0], rel=0.1)
    assert transformer_peak(forward, "sample") == pytest.approx(BEFORE[name][1], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_SPECS)
def test_every_published_network_is_counted_at_its_real_size(name):
    spec = MODEL_SPECS[name]
    counted = count_forward(forward_of(spec, height=1024, width=1024), gradients=True)
    parameters = sum(
        p.numel() for p in build_network(spec.transformer, spec.config, torch.bfloat16).parameters()
    )
    tokens = (1024 // spec.factor // (2 if spec.factor == 8 else 1)) ** 2
    # Two operations a parameter and token, and attention; embeddings and modulation less.
    assert counted.operations > 0.8 * 2 * parameters * tokens
    assert counted.saved > counted.inputs > 0

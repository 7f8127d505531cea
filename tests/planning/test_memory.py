"""Memory of each phase of an iteration, on a small FLUX.1."""

from typing import Any

import diffusers
import pytest
import torch

from flowrl.backbones.families import FAMILIES
from flowrl.backbones.small import small_folder
from flowrl.errors import UserError
from flowrl.planning.memory import (
    CONTEXT,
    MemorySetup,
    NetworkCopy,
    adapted_bytes,
    adapter_parameters,
    copy_bytes,
    few_bits_bytes,
    footprints,
    full_network,
    host_bytes,
    packed_layers,
    transformer_bytes,
)
from flowrl.planning.model_specs import MODEL_SPECS, spec_for
from flowrl.trees import presets
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import ode_plan

PHASES = ("encode", "rollout", "decode", "rewards", "training", "evaluation")
TARGETS = FAMILIES["FluxPipeline"].lora_targets
LATENT = 4 * 8 * 8


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return spec_for(str(small_folder(diffusers.FluxPipeline, tmp_path_factory.mktemp("flux"))))


@pytest.fixture(scope="module")
def network(spec):
    return full_network(spec, torch.bfloat16)


def setup(**changes: Any) -> MemorySetup:
    options: dict[str, Any] = {
        "height": 64, "width": 64, "text_tokens": 32, "rank": 4, "targets": TARGETS,
        "rollout_batch": 4, "micro_batch": 2, "decode_batch": 2, "plan": presets.ode(4, 4),
        "prompts_per_gpu": 2,
    }  # fmt: skip
    return MemorySetup(**(options | changes))


@pytest.fixture(scope="module")
def parts(spec):
    def parts(phase: str, **changes: Any):
        return {f.phase: f.parts for f in footprints(spec, setup(**changes))}[phase]

    return parts


def test_phases_come_in_order_and_a_total_is_the_sum_of_its_parts(spec):
    phases = footprints(spec, setup(evaluation_batch=2))
    assert tuple(f.phase for f in phases) == PHASES
    assert tuple(f.phase for f in footprints(spec, setup())) == PHASES[:-1]
    for footprint in phases:
        assert footprint.total == sum(footprint.parts.values())
        assert footprint.total - footprint.allocated >= CONTEXT


def test_adamw_takes_8_bytes_a_trained_number_and_adapters_4_each(parts, network):
    numbers = adapter_parameters(network, 4, TARGETS)
    assert parts("rollout")["optimiser"] == 8 * numbers > 0
    assert parts("rollout", adapters=3)["LoRA adapters"] == 12 * numbers
    assert parts("training", adapters=3)["LoRA adapters"] == 16 * numbers  # with the gradient


def test_latents_are_those_of_the_rollout(parts):
    s = setup()
    expected = rollout_bytes(s.plan, s.prompts_per_gpu, LATENT, 2)
    assert parts("rollout")["latents"] == parts("training")["latents"] == expected
    few = parts("evaluation", evaluation_batch=2, evaluation_steps=4, decode_batch=2)
    assert few["latents"] == rollout_bytes(ode_plan(4), 2, LATENT, 2)


def test_candidates_are_held_a_batch_of_trees_at_a_time_and_freed_before_training(parts):
    """50 trees of 9 nodes, of which 4 are held at once, then 4 of 3 nodes that are trained on."""
    few = {"plan": presets.ode(2, 4), "prompts_per_gpu": 1}
    many = few | {"candidates": presets.ode(8, 50)}
    batch = rollout_bytes(presets.ode(8, 4), 1, LATENT, 2)
    assert batch > parts("rollout", **few)["latents"]
    for phase in ("rollout", "decode"):
        assert parts(phase, **many)["latents"] == batch
    for phase in ("rewards", "training"):
        assert parts(phase, **many)["latents"] == parts(phase, **few)["latents"]


def test_guidance_doubles_the_rows_of_a_rollout_and_of_training(parts):
    twice = parts("rollout", rollout_batch=4, rollout_doubles=True)
    more = parts("rollout", rollout_batch=8, prompts_per_gpu=4)
    assert twice["activations"] == more["activations"]
    assert twice["text embeddings"] == 2 * parts("rollout")["text embeddings"]
    twice = parts("training", micro_batch=1, training_doubles=True)["activations"]
    assert twice == parts("training", micro_batch=2)["activations"]


def test_encoders_that_are_not_kept_are_alone_on_the_gpu_one_at_a_time(spec, parts):
    sizes = [e.parameters for e in spec.text_encoders]
    kept = parts("encode")
    assert kept["text encoders"] == 2 * sum(sizes) and kept["transformer"] > 0
    assert parts("training")["text encoders"] == 2 * sum(sizes)
    for where in ("offload", "free"):
        first = parts("encode", text_encoders=where, reward_bytes=5)
        assert first["text encoders"] == 2 * max(sizes)
        assert first["reward models"] == 5 and not first.get("transformer")
        assert not parts("training", text_encoders=where)["text encoders"]


def test_in_fp16_a_t5_keeps_what_transformers_keeps_in_fp32():
    t5 = MODEL_SPECS["flux.1-dev"].text_encoders[1]
    network = t5.build()
    exact = set(network._keep_in_fp32_modules)
    count = sum(p.numel() for n, p in network.named_parameters() if exact & set(n.split(".")))
    assert count == t5.fp32_parameters > 0
    assert t5.nbytes(torch.float16) == 2 * t5.parameters + 2 * count
    assert t5.nbytes(torch.bfloat16) == 2 * t5.parameters


def test_offloaded_merged_and_copied_weights_are_held_when_they_are_used(spec):
    changes = {"vae": "offload", "merged": True, "copies": (NetworkCopy(format="bf16"),)}
    phases = {f.phase: f.parts for f in footprints(spec, setup(reward_bytes=7, **changes))}
    held = {phase: of["autoencoder"] for phase, of in phases.items()}
    assert held.pop("decode") == 2 * spec.autoencoder_params
    assert set(held.values()) == {0}
    assert phases["rollout"]["merged weights"] > 0 and phases["decode"]["merged weights"] > 0
    assert "merged weights" not in phases["training"]
    assert all(of["network copies"] > 0 and of["reward models"] == 7 for of in phases.values())


def test_training_in_few_bits_keeps_the_exact_weights_too(parts):
    few = parts("training", training_copy=NetworkCopy(format="fp8", min_dim=0))
    exact = parts("training")
    assert few["transformer"] == exact["transformer"]
    assert few["network copies"] > 0
    assert few["matmul buffers"] > exact["matmul buffers"]


def test_wrong_sides_and_numbers_below_one_are_an_error(spec):
    with pytest.raises(UserError, match="60 .* 16"):
        footprints(spec, setup(width=60))
    with pytest.raises(UserError, match="micro_batch"):
        setup(micro_batch=0)
    with pytest.raises(UserError, match="memory.base_bits"):
        setup(base_bits=4, base_library="torchao")


def test_of_a_sharded_network_a_gpu_holds_its_share_and_the_blocks_that_compute(parts):
    whole = parts("rollout")["transformer"]
    shares = [parts("rollout", parts=n)["transformer"] for n in (2, 4, 8)]
    gathered = shares[0] - whole / 2  # the largest block twice and everything outside blocks
    for share, gpus in zip(shares, (2, 4, 8), strict=True):
        assert share == pytest.approx(whole / gpus + gathered, abs=2)


def test_a_machine_holds_every_process_s_pipeline_but_one_sharded_network(spec, parts):
    of = {
        (gpus, n): host_bytes(spec, setup(parts=n), gpus)["loading"]
        for gpus in (1, 8)
        for n in (1, 8)
    }
    assert of[8, 1] == 8 * of[1, 1]
    assert 0 < of[8, 8] - of[1, 1] == 7 * (of[1, 1] - parts("rollout")["transformer"])
    free = host_bytes(spec, setup(text_encoders="free", prompts=3, host_reward_bytes=7), 2)
    assert of[1, 1] * 2 - free["loading"] == 2 * parts("encode")["text encoders"]
    assert free["reward models"] == 14 and free["encoded prompts"] > 0


def test_few_bits_have_codes_and_scales_in_linear_layers_alone(network):
    for bits, library, expected in [
        (8, "bitsandbytes", 64 * 128 + 64 * 4),
        (8, "torchao", 64 * 128 + 64 * 2),
        (4, "bitsandbytes", 64 * 128 // 2 + 64 * 128 // 64 * 4),
    ]:
        assert few_bits_bytes(64, 128, bits, library) == expected
    exact, few = (transformer_bytes(network, setup(base_bits=bits)) for bits in (None, 4))
    linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Linear))
    assert exact - few == pytest.approx(2 * linear - linear / 2 - linear / 16, rel=0.01)


def test_copies_hold_packed_layers_and_adapted_or_added_weights(network):
    exact, beside = NetworkCopy(format="bf16"), NetworkCopy(format="bf16", merge=False)
    assert copy_bytes(network, exact, setup()) == adapted_bytes(network, setup()) > 0
    assert copy_bytes(network, beside, setup()) == 4 * adapter_parameters(network, 4, TARGETS)
    cheap = NetworkCopy(format="fp8", min_dim=0)
    packed = packed_layers(network, cheap)
    both = sum(
        layer.weight.numel()
        for key, layer in network.named_modules()
        if key in packed and key.endswith(tuple(TARGETS))
    )
    merged = adapted_bytes(network, setup()) - 2 * both
    assert copy_bytes(network, cheap, setup()) == sum(packed.values()) + merged
    for merge in (True, False):
        fp8, bf16, auto = (
            copy_bytes(network, NetworkCopy(format=format, merge=merge, min_dim=0), setup())
            for format in ("fp8", "bf16", "auto")
        )
        assert auto == max(fp8, bf16) > 0


def test_a_lora_of_sd35_large_has_its_closed_form():
    """38 blocks of width 2432 with 8 square layers each, but for the last block's last."""
    network = full_network(MODEL_SPECS["sd3.5-large"], torch.bfloat16)
    layers = 38 * 8 - 1
    targets = FAMILIES["StableDiffusion3Pipeline"].lora_targets
    assert adapter_parameters(network, 32, targets) == 32 * layers * 2 * 2432

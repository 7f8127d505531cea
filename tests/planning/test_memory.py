"""Memory of each phase of an iteration, on the tiny SD3."""

import pytest
import torch

from flowrl.assembly.work_split import split_work
from flowrl.config import parse_config
from flowrl.planning.memory import (
    CONTEXT,
    OVERHEAD,
    MemoryPlan,
    encoded_prompts,
    few_bits_bytes,
    rollout_bytes,
)
from flowrl.planning.model_specs import spec_for
from flowrl.planning.rewards import CLIP_L
from flowrl.planning.work import count_work
from flowrl.trees.plan import Step, TreePlan, ode_plan
from flowrl.trees.presets import chains

pytestmark = pytest.mark.usefixtures("even_activations")
PHASES = ("encode", "rollout", "decode", "rewards", "training", "evaluation")
BASE = {
    "pipeline": {"path": "tiny-sd3", "dtype": "bf16", "height": 64, "width": 64}
    | {"max_sequence_length": 32, "decode_batch": 2},
    "lora": {"rank": 4, "alpha": 4},
    "prompts": {"train": "tiny:geneval:train"},
    "rollout": {"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 4}
    | {"batch_size": 4, "tree": {"kind": "ode"}},
    "objective": {"kind": "nft"},
    "optim": {"micro_batch": 2},
    "evaluation": {"prompts": None},
    "rewards": [{"name": "brightness"}],
    "run": {"iterations": 3},
}
EVALUATED = {"prompts": "tiny:geneval:test", "num_images": 4, "batch_size": 2}


def plan(gpus: int = 1, **sections) -> MemoryPlan:
    data = {k: {**v, **sections.get(k, {})} if isinstance(v, dict) else v for k, v in BASE.items()}
    data |= {k: v for k, v in sections.items() if not isinstance(v, dict) or k not in data}
    config = parse_config(data)
    work = count_work(config)
    (kind,) = work.kinds
    split = split_work(kind.load, gpus)
    spec = spec_for(config.pipeline.path)
    return MemoryPlan(config=config, spec=spec, needs=work.needs, split=split, kind=kind)


def parts(phase: str, gpus: int = 1, **sections) -> dict[str, int]:
    return dict({f.phase: f.parts for f in plan(gpus, **sections).footprints()}[phase])


def test_phases_come_in_order_and_a_total_is_the_sum_of_its_parts():
    phases = plan(evaluation=EVALUATED).footprints()
    assert tuple(f.phase for f in phases) == PHASES
    assert tuple(f.phase for f in plan().footprints()) == PHASES[:-1]
    for footprint in phases:
        assert footprint.total == sum(footprint.parts.values())
        assert footprint.parts[OVERHEAD] >= CONTEXT


def test_adamw_takes_8_bytes_a_trained_number_and_adapters_4_each():
    numbers = plan().adapter
    assert parts("rollout")["optimiser"] == 8 * numbers > 0
    assert parts("rollout")["LoRA adapters"] == 8 * numbers  # the policy and NFT's old one
    ema = {"decay": 0.9}
    assert parts("rollout", ema=ema)["LoRA adapters"] == 12 * numbers
    assert parts("training", ema=ema)["LoRA adapters"] == 16 * numbers  # with the gradient


def test_candidates_are_held_a_batch_of_trees_at_a_time_and_freed_before_training():
    """48 trees of 5 nodes, of which 4 are held at once, then 2 that are trained on."""
    explore = {"candidates": 48, "num_inference_steps": 4, "precision": "bf16"}
    few = {"prompts_per_iteration": 1, "group_size": 2}
    many = plan(rollout=few | {"explore": explore})
    latent = many.spec.channels * (64 // many.spec.factor) ** 2
    batch = rollout_bytes(chains(4, 4, noisy=()), 1, latent, 2)
    held = {f.phase: f.parts.get("latents") for f in many.footprints()}
    plain = parts("rollout", rollout=few)["latents"]
    assert held["rollout"] == held["decode"] == batch > plain
    assert held["rewards"] == held["training"] == plain


def test_encoders_that_are_not_kept_are_alone_on_the_gpu_one_at_a_time():
    sizes = plan().spec.text_encoders
    kept = parts("encode", memory={"text_encoders": "keep"})
    assert kept["text encoders"] == 2 * sum(sizes) and kept["transformer"] > 0
    rewards = [{"name": "clipscore"}]
    for where in ("offload", "free"):
        encoding = parts("encode", memory={"text_encoders": where}, rewards=rewards)
        assert encoding["text encoders"] == 2 * max(sizes)
        assert encoding["reward models"] == 4 * CLIP_L.parameters
        assert not encoding.get("transformer")
        assert not parts("training", memory={"text_encoders": where})["text encoders"]


def test_offloaded_and_merged_weights_are_held_when_they_are_used():
    memory = plan(memory={"vae": "offload"}, rollout={"merge_lora": True})
    phases = {f.phase: f.parts for f in memory.footprints()}
    held = {phase: of.get("autoencoder", 0) for phase, of in phases.items()}
    assert held.pop("decode") == 2 * memory.spec.autoencoder_params
    assert set(held.values()) == {0}
    assert phases["rollout"]["merged weights"] == memory.adapted_bytes({}) > 0
    assert "merged weights" not in phases["training"]


def test_training_in_few_bits_keeps_the_exact_weights_too():
    few = parts("training", pipeline={"precision": "fp8", "min_dim": 0})
    exact = parts("training")
    assert few["transformer"] == exact["transformer"] and few["network copies"] > 0
    assert few["matmul buffers"] > exact["matmul buffers"]


def test_of_a_sharded_network_a_gpu_holds_its_share_and_the_blocks_that_compute():
    sections = {"rollout": {"prompts_per_iteration": 8}}
    whole = plan(**sections).sharded_bytes()
    shard = sections | {"runtime": {"shard": "node"}}
    shares = [plan(n, **shard).sharded_bytes() for n in (2, 4, 8)]
    gathered = shares[0] - whole / 2  # the largest block twice and everything outside blocks
    for share, gpus in zip(shares, (2, 4, 8), strict=True):
        assert share == pytest.approx(whole / gpus + gathered, abs=2)


def test_few_bits_have_codes_and_scales_in_linear_layers_alone():
    assert few_bits_bytes(64, 128, 8) == 64 * 128 + 64 * 2
    assert few_bits_bytes(64, 128, 4) == 64 * 128 // 2 + 64 * 128 // 64 * 4
    exact, few = (plan(memory={"base_bits": bits}) for bits in (None, 4))
    layers = [m for m in exact.network.modules() if isinstance(m, torch.nn.Linear)]
    saved = exact.transformer_bytes() - few.transformer_bytes()
    linear = sum(layer.weight.numel() for layer in layers)
    assert saved == pytest.approx(2 * linear - linear / 2 - linear / 16, rel=0.01)


def test_a_machine_holds_every_process_s_pipeline_but_one_sharded_network():
    sections = {"rollout": {"prompts_per_iteration": 8}}
    one, many = (plan(n, **sections).host_bytes() for n in (1, 8))
    shared = plan(8, **sections, runtime={"shard": "node"})
    assert many["loading"] == 8 * one["loading"]
    difference = many["loading"] - shared.host_bytes()["loading"]
    assert difference == 7 * shared.transformer_bytes()
    free = plan(8, **sections, memory={"text_encoders": "free"}).host_bytes()
    assert many["loading"] - free["loading"] == 8 * shared.encoders


def test_encoded_prompts_are_those_of_the_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\na dog\na cat\n")
    rollout = {"prompts_per_iteration": 2}
    free = {"text_encoders": "free"}
    few, missing = (
        plan(prompts={"train": str(path)}, rollout=rollout, memory=free).config
        for path in (file, tmp_path / "none.txt")
    )
    assert (encoded_prompts(few), encoded_prompts(missing)) == (2, 6)


def test_latents_are_those_of_nodes_edges_and_the_widest_step():
    noisy = Step(noise=True, train=True)
    tree = TreePlan(1, (Step(branch=4, noise=True, train=True), noisy, noisy, Step()))
    nodes, edges, parents, widest = 17, 12, 9, 4
    expected = 2 * 2 * nodes + (2 + 4 + 4) * edges + 2 * parents + 5 * 4 * widest
    assert rollout_bytes(tree, 1, 1, 2) == expected
    assert rollout_bytes(tree, 3, 16, 2) == 3 * 16 * expected


def test_latents_are_those_of_the_rollout():
    memory = plan()
    latent = memory.spec.channels * (64 // memory.spec.factor) ** 2
    expected = rollout_bytes(memory.kind.plan, 2, latent, 2)
    assert parts("rollout")["latents"] == parts("training")["latents"] == expected
    few = parts("evaluation", evaluation=EVALUATED | {"num_inference_steps": 4})
    assert few["latents"] == rollout_bytes(ode_plan(4), 2, latent, 2)

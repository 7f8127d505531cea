"""Two stages against one on networks of published sizes with random weights."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrl.backbones.policy import POLICY, Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.bench.bench_costs import Counts, columns_of, own_words
from flowrl.bench.bench_stages import full_batch, measure, move, on_gpu
from flowrl.bench.random_model import RandomBackbone
from flowrl.build.rollout import EXPLORING
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.planning.sizes import size_of
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.backends import Plain
from flowrl.quantization.layer_rules import LayerChoice, quantised_share
from flowrl.quantization.precision import Resolved, capability_of, resolve
from flowrl.quantization.prepare import prepare
from flowrl.quantization.rollout_model import Twin
from flowrl.sampling.networks import of_twin, policys_own, with_network
from flowrl.sampling.source import Sampler
from flowrl.sampling.stage import Stage
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.combine import FailureLimit
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.trees import presets
from flowrl.utils.distributed import Runtime

RANK, ALPHA = 32, 64  # of Sol-RL (2604.06916)


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A size on a device, ready to draw: the trained one, its exact copy and its cheap one."""

    name: str
    backbone: RandomBackbone
    policy: Policy
    runtime: Runtime
    resolved: Resolved
    choices: Sequence[LayerChoice]
    exact: Twin
    low: Twin
    compiled: bool


def bench_sizes(
    *,
    name: str,
    precision: str,
    plans: Sequence[Counts],
    prompts: int,
    batch: int,
    decode_batch: int,
    pixels: int | None,
    layers: int | None,
    min_dim: int | None,
    compile: bool | None,
    repeats: int,
    device: str,
) -> list[dict[str, Any]]:
    """One row a plan: `Costs.row`, and what is quantised.

    Raises UserError for an unknown name, on a CPU for a network of full depth, for a precision
    that the device lacks, and for kernels that do not agree with their emulation.
    """
    size_of(name)
    runtime = Runtime(device=device)
    if runtime.device.type == "cpu" and layers is None:
        raise UserError(
            f"{name} at its full depth would take a CPU hours: use a GPU, or give --layers 2 to "
            "see that everything runs, which says nothing of speed"
        )
    compile = on_gpu(device) if compile is None else compile
    networks = build_networks(
        name, precision, runtime, pixels=pixels, layers=layers, min_dim=min_dim, compile=compile
    )
    rows = []
    for plan in plans:
        source = sampler_of(networks, plan, prompts, batch, decode_batch)
        rows.append(_row(networks, plan, source, repeats, layers))
    torch.compiler.reset()  # which would hold on to this network beside the next
    return rows


def build_networks(
    name: str,
    precision: str,
    runtime: Runtime,
    *,
    pixels: int | None,
    layers: int | None,
    min_dim: int | None,
    compile: bool,
) -> Networks:
    """bf16, with a LoRA of rank 32 whose second factor is not 0, as after some training."""
    resolved = resolve(precision, capability_of(runtime.device))
    backbone = RandomBackbone(
        name, device=runtime.device, dtype=torch.bfloat16, pixels=pixels, layers=layers
    )
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    move(policy)
    with own_words():
        choices, backend = prepare(
            policy.network, resolved, dtype=backbone.dtype, device=runtime.device, min_dim=min_dim
        )
    return Networks(
        name=name,
        backbone=backbone,
        policy=policy,
        runtime=runtime,
        resolved=resolved,
        choices=choices,
        exact=Twin(policy, (), Plain(backbone.dtype), compile=compile),
        low=Twin(policy, choices, backend, compile=compile),
        compiled=compile,
    )


def sampler_of(
    networks: Networks, plan: Counts, prompts: int, batch: int, decode_batch: int
) -> Sampler:
    """Draws and explores as training does; brightness is its reward, the text is noise."""
    records = [PromptRecord(uid=str(i), text=f"prompt {i}") for i in range(prompts)]
    size = full_batch(batch, prompts * plan.candidates, prompts * plan.keep)
    exact = _stage(networks, networks.exact, plan.steps, size, decode_batch)
    low = _stage(networks, networks.low, plan.preview_steps, size, decode_batch)
    low = replace(low, times=EXPLORING)
    preview = presets.ode(plan.preview_steps, plan.candidates)
    return Sampler(
        stage=exact,
        plan=lambda iteration: presets.ode(plan.steps, plan.keep),
        prompts=PromptSampler(records, prompts, seed=0),
        seed=0,
        explorer=Explorer(
            stage=lambda iteration, candidates: (low, {}),
            plan=lambda iteration: preview,
            mode="best_worst",
        ),
    )


def _stage(networks: Networks, twin: Twin, steps: int, batch: int, decode_batch: int) -> Stage:
    backbone = with_network(networks.backbone, twin.network)
    return Stage(
        backbone=backbone,
        network=functools.partial(of_twin, twin, backbone, POLICY, runtime=networks.runtime),
        encode=TextCache(networks.backbone),
        specs=[RewardSpec(name="brightness", reward=load_reward("brightness"))],
        runtime=networks.runtime,
        failures=FailureLimit(max_fraction=0.0),
        steps=steps,
        kernel=KERNELS["flow_sde"],
        level=0.0,  # no plan here has noise
        batch_size=batch,
        decode_batch=decode_batch,
        whole_prompts=False,
    )


def _row(
    networks: Networks, plan: Counts, source: Sampler, repeats: int, layers: int | None
) -> dict[str, Any]:
    network = functools.partial(
        policys_own, networks.policy, networks.backbone, POLICY,
        merged=False, runtime=networks.runtime,
    )  # fmt: skip
    peft = replace(source.stage, backbone=networks.backbone, network=network)
    costs = measure(source, peft, lambda: move(networks.policy), repeats=repeats)
    made = [choice for choice in networks.choices if choice.format]
    return {
        "size": networks.name,
        "plan": str(plan),
        "layers": "all" if layers is None else f"{layers} of each kind: says nothing of speed",
        "pixels": networks.backbone.pixels,
        **columns_of(networks.resolved),
        "compiled": networks.compiled,
        "quantised_layers": len(made),
        "quantised_share": quantised_share(networks.choices) if made else 0.0,
        "cheap_copy_gb": networks.low.nbytes() / 1e9,
        "exact_copy_gb": networks.exact.nbytes() / 1e9,
    } | costs.row()

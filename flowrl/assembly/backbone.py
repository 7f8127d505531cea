"""Build the pipeline and the backbone around it, with the precision of its frozen weights."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from flowrl.backbones.call import call_arguments
from flowrl.backbones.families import family_of
from flowrl.backbones.loading import (
    DTYPES,
    enable_gradient_checkpointing,
    enable_vae_tiling,
    load_pipeline,
    outline,
    set_attention,
)
from flowrl.backbones.offload import AUTOENCODER, ENCODER, place_pipeline
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.quantized_base import check_base_bits, is_quantised, loading_config
from flowrl.backbones.sharding import NETWORK, shard_network
from flowrl.config import Config
from flowrl.config.sections import LoRAOptions, MemoryOptions, PipelineOptions
from flowrl.errors import UserError
from flowrl.quantization.backends import (
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
    resolve,
)
from flowrl.quantization.linear import quantise_base
from flowrl.quantization.rollout_model import log_precision, prepare
from flowrl.utils.distributed import Runtime

LOG = logging.getLogger(__name__)


def build_backbone(
    options: PipelineOptions, pipeline: Any, *, guidance: float, runtime: Runtime | None = None
) -> PipelineBackbone:
    """Return the backbone around a pipeline. Raises UserError for one that samples no flow.

    runtime: of the processes that share the network's parts; None for one that is whole.
    """
    return PipelineBackbone(
        pipeline,
        guidance=guidance,
        max_sequence_length=options.max_sequence_length,
        height=options.height,
        width=options.width,
        in_step=int if runtime is None else runtime.rounds,
    )


def call_settings(config: Config, pipeline: Any) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that generate as the run's evaluation does."""
    p, e = config.pipeline, config.evaluation
    call = call_arguments(
        pipeline,
        guidance=e.guidance_scale,
        negative=config.rollout.negative_prompt,
        max_sequence_length=p.max_sequence_length,
        height=p.height,
        width=p.width,
    )
    return {"num_inference_steps": e.step_counts[0], **call}


def adapted_layers(lora: LoRAOptions, backbone: PipelineBackbone) -> tuple[str, ...]:
    """Return the name endings of the adapted layers."""
    targets = tuple(lora.targets or backbone.lora_targets)
    family = family_of(type(backbone.pipeline).__name__)
    if not (lora.targets or family.lora_targets):
        LOG.info("lora.targets is null: adapters on %s", ", ".join(targets))
    return targets


def build_pipeline(
    config: Config,
    device: torch.device,
    provided: Any = None,
    *,
    loaded: Mapping[str, Any] | None = None,
    revision: str | None = None,
    decoder_learns: bool = False,
    runtime: Runtime | None = None,
) -> Any:
    """Return the pipeline that the configuration names, or `provided`, placed as `memory` says.

    Args:
        runtime: of the processes among which `runtime.shard` splits the transformer; None leaves
            it whole.
        loaded: components by name that are there already, None for those to leave out.
        revision: None for the recipe's.
        decoder_learns: gradients go through the autoencoder, which then stays on the device.
    """
    p, m = config.pipeline, config.memory
    if m.base_bits is not None:
        check_base_bits(m, device)
    away = (ENCODER,) if m.text_encoders != "keep" else ()
    if m.vae == "offload" and decoder_learns:
        LOG.warning(
            "memory.vae is offload, but objective %s follows gradients through the autoencoder, "
            "which stays on the device for that",
            config.objective.kind,
        )
    elif m.vae == "offload":
        away += (AUTOENCODER,)
    over = None if runtime is None or runtime.world_size == 1 else config.runtime.shard
    if over is not None and runtime is not None:
        pipeline = _sharded(p, over, runtime, provided, loaded or {}, revision or p.revision)
        pipeline = place_pipeline(pipeline, device, away)
    elif provided is None:
        pipeline = load_pipeline(
            p.path,
            dtype=p.dtype,
            device=device,
            revision=revision or p.revision,
            rounding=None if m.base_bits is None else loading_config(m, DTYPES[p.dtype]),
            away=away,
            parts=loaded,
        )
    else:
        if m.base_bits is not None and not is_quantised(provided.transformer):
            raise UserError(
                "memory.base_bits rounds weights as they load, and the pipeline is loaded already: "
                "load it with diffusers' quantization_config, or give its name instead"
            )
        pipeline = place_pipeline(provided, device, away)
    if p.attention is not None:
        set_attention(pipeline.transformer, p.attention)
    if m.gradient_checkpointing:
        enable_gradient_checkpointing(pipeline.transformer)
    if m.vae_tiling:
        enable_vae_tiling(pipeline.vae)
    return pipeline


def load_without_transformer(options: PipelineOptions) -> Any:
    """Load a pipeline to the CPU for its text encoders, with a transformer that has no memory.

    The transformer is on the meta device; a pipeline without one of diffusers' is loaded whole.
    """
    try:
        _, network = outline(options.path, options.revision)
    except UserError:  # or loading says what is wrong
        parts = {}
    else:
        parts = {NETWORK: nn.Module.to(network, DTYPES[options.dtype])}
    return load_pipeline(
        options.path, dtype=options.dtype, device=None, revision=options.revision, parts=parts
    )


def _sharded(
    options: PipelineOptions,
    over: Literal["node", "all"],
    runtime: Runtime,
    provided: Any,
    loaded: Mapping[str, Any],
    revision: str | None,
) -> Any:
    """Return the pipeline with its transformer in parts, which the main process alone has read."""
    pipeline = provided
    if provided is None:
        empty = {} if runtime.is_main else {NETWORK: outline(options.path, revision)[1]}
        pipeline = load_pipeline(
            options.path, dtype=options.dtype, device=None, revision=revision,
            parts={**loaded, **empty},
        )  # fmt: skip
    shard_network(pipeline.transformer, runtime, over)
    return pipeline


def rounding_key(memory: MemoryOptions) -> dict[str, Any]:
    """Return what changes images, for keys of results: rounded weights, tiles; {} for neither.

    All other options under `memory` leave images and scores as they are.
    """
    return memory.model_dump(include={"base_bits", "vae_tiling"}, exclude_defaults=True)


def set_precision(config: Config, backbone: PipelineBackbone, runtime: Runtime) -> None:
    """Pack the network's frozen weights as `pipeline.precision` says, before adapters are added.

    Raises UserError for a precision that the device or a layer cannot have.
    """
    p = config.pipeline
    if p.precision is None:
        return
    precision = resolve(p.precision, runtime.device)
    layers, backend = prepare(
        backbone.transformer,
        precision,
        dtype=network_dtype(backbone),
        device=runtime.device,
        min_dim=p.min_dim,
        convolutions=False,
    )
    if runtime.is_main:
        log_precision("rollouts and training", precision, layers)
    if isinstance(backend, NVFP4Native | NVFP4Emulated):
        backend = PerRow(backend)  # the same numbers for any batch: a rollout's, a micro-batch
    if backend is not None:
        quantise_base(backbone.transformer, layers, backend, p.quantize_gradients)
    elif p.quantize_gradients:
        raise UserError(
            f"pipeline.quantize_gradients needs quantised layers, and precision {p.precision} is "
            f"{precision} here: set it to false, or name a precision of fewer bits"
        )


def network_dtype(backbone: PipelineBackbone) -> torch.dtype:
    """Return what the network computes in; latents may be stored in more."""
    return getattr(backbone.transformer, "dtype", backbone.dtype)

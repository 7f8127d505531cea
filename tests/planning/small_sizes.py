"""The published sizes, a few numbers wide and a few blocks deep, so that every block counts."""

from dataclasses import replace
from functools import cache
from typing import Any

from flowrl.backbones import flux, sana, sd3
from flowrl.planning.memory import MemorySetup
from flowrl.planning.model_specs import MODEL_SPECS, ModelSpec
from flowrl.trees import presets

TARGETS = {"sd3": sd3.LORA_TARGETS, "flux": flux.LORA_TARGETS, "sana": sana.LORA_TARGETS}

NARROW: dict[str, dict[str, Any]] = {
    "sd3.5-medium": {
        "num_layers": 9, "dual_attention_layers": (0, 1, 2, 3), "num_attention_heads": 2,
        "attention_head_dim": 16, "caption_projection_dim": 32, "joint_attention_dim": 48,
        "pooled_projection_dim": 40, "pos_embed_max_size": 16, "sample_size": 8,
    },
    "flux.1-dev": {
        "num_layers": 4, "num_single_layers": 6, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 48, "pooled_projection_dim": 40,
        "axes_dims_rope": (4, 6, 6),
    },
    "sana-1.6b": {
        "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 5,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
        "cross_attention_dim": 32, "caption_channels": 48, "sample_size": 8,
    },
}  # fmt: skip


@cache  # specs are compared by identity
def small(name: str) -> ModelSpec:
    size = MODEL_SPECS[name]
    return replace(
        size,
        config={**size.config, **NARROW[name]},
        text_encoders=(),
        text_tokens=90,
        autoencoder_config=_decoder(size.autoencoder_config),
    )


def _decoder(config: Any) -> dict[str, Any]:
    """As deep, but 32 channels wide."""
    narrow = {key: (32,) * len(value) for key, value in config.items() if key in WIDTHS}
    return {**config, **narrow}


WIDTHS = ("block_out_channels", "encoder_block_out_channels", "decoder_block_out_channels")


def setup(name: str, **changes: Any) -> MemorySetup:
    given: dict[str, Any] = {
        "height": 64, "width": 64, "rank": 4, "targets": TARGETS[MODEL_SPECS[name].family],
        "rollout_batch": 4, "micro_batch": 2, "decode_batch": 2, "plan": presets.ode(4, 4),
        "prompts_per_gpu": 2,
    }  # fmt: skip
    return MemorySetup(**(given | changes))

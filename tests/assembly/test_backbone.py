"""Which layers of a network get adapters."""

from flowrl.assembly.backbone import adapted_layers
from flowrl.assembly.learner import build_backbone
from flowrl.config import parse_config

DUAL = tuple(f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))


def layers(pipeline, family="sd3", **lora):
    config = parse_config(
        {
            "pipeline": {"max_sequence_length": 12},
            "lora": lora,
            "prompts": {"train": "tiny:all:train"},
            "rewards": [{"name": "brightness"}],
        }
    )
    backbone = build_backbone(config.pipeline, pipeline, guidance=1.0)
    return adapted_layers(config.lora, backbone)

"""Which layers of a network get adapters."""

import pytest
import torch

from flowrl.assembly.backbone import adapted_layers
from flowrl.assembly.learner import build_backbone
from flowrl.config import parse_config
from flowrl.errors import UserError

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


def test_dual_attention_is_adapted_only_on_request_beside_given_targets(load_tiny):
    from diffusers import SD3Transformer2DModel

    pipeline = load_tiny()
    changes = {"num_layers": 4, "dual_attention_layers": (0, 1)}
    with torch.device("meta"):
        pipeline.transformer = SD3Transformer2DModel.from_config(
            dict(pipeline.transformer.config) | changes
        )
    plain = layers(pipeline)
    assert not any("attn2" in name for name in plain)
    assert layers(pipeline, dual_attention=True) == plain + DUAL
    assert layers(pipeline, dual_attention=True, targets=["attn.to_q"]) == ("attn.to_q", *DUAL)


@pytest.mark.parametrize("family", ["sd3", "flux", "sana"])
def test_dual_attention_is_refused_where_the_network_has_none(load_tiny, family):
    """SANA's attention to the text is called attn2 too, and is not meant."""
    with pytest.raises(UserError, match=r"lora\.dual_attention"):
        layers(load_tiny(family=family), family, dual_attention=True)

"""The text encoders of the published pipelines: configurations of transformers' classes.

Sources: the `config.json` files that the pipelines' repositories carry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """A text encoder as a class of transformers, its configuration's class, and its values.

    parameters: numbers in it, of the part that the pipeline loads. wide: of them, those that
    transformers keeps in fp32 where the rest is loaded in fp16 (`_keep_in_fp32_modules`).
    """

    name: str
    model: str
    config_class: str
    config: Mapping[str, Any]
    parameters: int
    wide: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of its weights, loaded in a dtype."""
        wide = self.wide if dtype == torch.float16 else 0
        return self.parameters * dtype.itemsize + wide * (4 - dtype.itemsize)


def _clip(name: str, model: str, width: int, layers: int, act: str, parameters: int) -> TextEncoder:
    """CLIP's text part (2103.00020): heads of 64, 77 tokens of 49,408."""
    config = {
        "vocab_size": 49_408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "projection_dim": width,
        "max_position_embeddings": 77,
        "hidden_act": act,
    }
    return TextEncoder(
        name=name, model=model, config_class="CLIPTextConfig", config=config, parameters=parameters
    )


_PROJECTED = "CLIPTextModelWithProjection"
CLIP_L = _clip("CLIP ViT-L", _PROJECTED, 768, 12, "quick_gelu", 123_650_304)
CLIP_L_BARE = _clip("CLIP ViT-L", "CLIPTextModel", 768, 12, "quick_gelu", 123_060_480)
CLIP_G = _clip("OpenCLIP ViT-bigG", _PROJECTED, 1280, 32, "gelu", 694_659_840)
T5_XXL = TextEncoder(
    name="T5 v1.1 XXL",
    model="T5EncoderModel",
    config_class="T5Config",
    config={
        "vocab_size": 32_128,
        "d_model": 4096,
        "d_ff": 10_240,
        "d_kv": 64,
        "num_heads": 64,
        "num_layers": 24,
        "feed_forward_proj": "gated-gelu",
    },
    parameters=4_762_310_656,
    wide=24 * 4096 * 10_240,  # `wo` of every layer, whose products leave fp16's range
)
GEMMA = TextEncoder(
    name="Gemma 2 2B",
    model="Gemma2Model",
    config_class="Gemma2Config",
    config={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    parameters=2_614_341_888,
)

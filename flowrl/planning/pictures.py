"""The most bytes alive while pictures are decoded and texts encoded, beside the weights."""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from flowrl.planning.activations import autocast_of
from flowrl.planning.kernels import kernels_own
from flowrl.planning.network import Module, as_module, build
from flowrl.planning.sizes import Size
from flowrl.planning.tracking import LiveBytes, on_meta

CLIP_TOKENS = 77
# Gemma reads SANA's instruction before the prompt; its tokens, counted by words and rounded up.
INSTRUCTION_TOKENS = 256


@lru_cache(maxsize=64)
def decode_peak(module: Module, latents: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Of latents (B, C, h, w) -> pictures in fp32, under the autocast of a rollout."""
    network: Any = build(module, dtype)
    network.encoder = nn.Identity()
    z = on_meta(*latents, dtype=dtype)
    tracker = _tracker(network, z)
    with tracker, autocast_of(dtype), torch.no_grad():
        pictures = network.decode(z / 1.0, return_dict=False)[0]
        (pictures * 0.5 + 0.5).clamp(0, 1).float()
    return tracker.peak


def encode_peak(size: Size, rows: int, text_tokens: int | None, dtype: torch.dtype) -> int:
    """Of the text encoder that needs most, for so many texts at once; 0 where there is none.

    Without autocast, which `TextCache` switches off.
    """
    found = [0]
    for encoder in size.text_encoders:
        tokens = tokens_of(size, encoder.config, text_tokens)
        module = as_module(encoder.model, encoder.config)
        found.append(_encoder_peak(module, encoder.config_class, rows, tokens, dtype))
    return max(found)


def tokens_of(size: Size, config: Any, text_tokens: int | None) -> int:
    """Of one text in an encoder: CLIP has its own number, the others share the rest."""
    if config.get("max_position_embeddings") == CLIP_TOKENS:
        return CLIP_TOKENS
    tokens = size.text_tokens if text_tokens is None else text_tokens
    if size.family == "sd3":
        return tokens - CLIP_TOKENS
    return tokens + (INSTRUCTION_TOKENS if size.family == "sana" else 0)


@lru_cache(maxsize=64)
def _encoder_peak(
    module: Module, config_class: str, rows: int, tokens: int, dtype: torch.dtype
) -> int:
    """One layer is enough: without gradients nothing of the earlier ones is kept."""
    import transformers

    config = json.loads(module.config)
    for depth in ("num_layers", "num_hidden_layers"):
        if depth in config:
            config[depth] = 1
    made = getattr(transformers, config_class)(**config)
    with torch.device("meta"):
        network = getattr(transformers, module.made)(made)
    nn.Module.to(network, dtype).requires_grad_(False).eval()
    if dtype == torch.float16:
        keep_wide(network)
    ids = on_meta(rows, tokens, dtype=torch.long)
    tracker = _tracker(network, ids)
    with tracker, autocast_of(torch.float32), torch.no_grad():
        network(input_ids=ids)
    return tracker.peak


def keep_wide(network: Any) -> int:
    """Put what transformers keeps in fp32 beside fp16 there -> how many numbers that is."""
    wide = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    found = 0
    for name, parameter in network.named_parameters():
        if wide & set(name.split(".")):
            parameter.data = parameter.data.float()
            found += parameter.numel()
    return found


def _tracker(network: nn.Module, given: torch.Tensor) -> LiveBytes:
    outside = [*network.parameters(), *network.buffers(), given]
    return LiveBytes(outside, during=kernels_own())

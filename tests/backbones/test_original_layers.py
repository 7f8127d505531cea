"""ComfyUI's file adds to every original layer what the diffusers LoRA adds, and to no other.

The judge is diffusers' own converter from the original checkpoints: fed with the changes of the
original layers, it must give back the changes of diffusers' layers, and leave nothing over.
"""

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils as convert
from torch import nn

from flowrl.backbones.original_layers import (
    PREFIX,
    comfyui_state,
    from_original,
    layers_of,
    weight_change,
)
from flowrl.errors import UserError

RANK, SCALE = 2, 1.5
NETWORKS = {  # class -> arguments, and diffusers' converter from the original
    "SD3Transformer2DModel": (
        {
            "sample_size": 8, "num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2,
            "joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 10,
            "pos_embed_max_size": 8, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm",
        },
        convert.convert_sd3_transformer_checkpoint_to_diffusers,
    ),
    # As wide as FLUX.1, which the converter takes for granted.
    "FluxTransformer2DModel": (
        {"num_layers": 2, "num_single_layers": 1, "guidance_embeds": True},
        convert.convert_flux_transformer_checkpoint_to_diffusers,
    ),
    "Flux2Transformer2DModel": (
        {
            "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "in_channels": 8,
            "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4),
        },
        convert.convert_flux2_transformer_checkpoint_to_diffusers,
    ),
    "QwenImageTransformer2DModel": (
        {
            "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 8,
            "out_channels": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
        },
        dict,  # the same names
    ),
    "ZImageTransformer2DModel": (
        {
            "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 24, "axes_dims": (4, 6, 6), "axes_lens": (32, 32, 32),
            "in_channels": 4,
        },
        convert.convert_z_image_transformer_checkpoint_to_diffusers,
    ),
}  # fmt: skip


class Changes(dict):
    """Changes of the original layers, 0 for every other tensor. What is used is taken out."""

    def pop(self, key, *default):
        return super().pop(key) if key in self else torch.zeros(21504)  # FLUX.1's widest


@pytest.fixture(scope="module", params=NETWORKS)
def lora(request):
    """The name of a network's class, and factors for all its linear layers."""
    with torch.device("meta"):
        network = getattr(diffusers, request.param)(**NETWORKS[request.param][0])
    generator, state = torch.Generator().manual_seed(0), {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            # FLUX.1's layers take two inputs: they are wide.
            inputs = 2 if "FluxT" in request.param else layer.in_features
            for side, shape in (("A", (RANK, inputs)), ("B", (layer.out_features, RANK))):
                state[f"{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator)
    return request.param, state


def converted(network: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ComfyUI's loader adds to the original layers, in diffusers' names by its converter."""
    changes, names = Changes(), {n.removesuffix(".alpha") for n in tensors if n.endswith(".alpha")}
    assert len(tensors) == 3 * len(names)
    for name in names:
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        scale = tensors[f"{name}.alpha"].item() / down.shape[0]
        changes[f"{name.removeprefix(PREFIX)}.weight"] = weight_change(down, up, scale)
    if "SD3" in network:  # which the converter measures
        changes.setdefault("context_embedder.weight", torch.zeros(16, 12))
    result = NETWORKS[network][1](changes)
    assert result is changes or not changes or "Qwen" in network, "layers that it does not have"
    return result


def test_every_layer_changes_as_diffusers_changes_it_and_comes_back(lora):
    network, state = lora
    layers = layers_of(state)
    tensors = comfyui_state(state, dict.fromkeys(layers, SCALE), network)
    changes = converted(network, tensors)
    assert len(layers) > 20
    for name, factors in layers.items():
        expected = weight_change(*factors, SCALE)
        torch.testing.assert_close(changes[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5)
    returned = {}
    plain = {name: t for name, t in tensors.items() if not name.endswith(".alpha")}
    for name, factors in layers_of(plain).items():
        # Also in kohya's spelling.
        returned |= from_original(name.removeprefix(PREFIX).replace(".", "_"), factors, network)
    assert returned.keys() == layers.keys()
    assert all(
        torch.equal(a, b) for n in layers for a, b in zip(returned[n], layers[n], strict=True)
    )


def test_layers_without_a_lora_do_not_change(lora):
    """Only values, of each group of queries, keys and values; and scales of their own."""
    network, state = lora
    state = {n: t for n, t in state.items() if ".to_v." in n or "add_v" in n}
    own = {name: float(i + 1) for i, name in enumerate(layers_of(state))}
    changes = converted(network, comfyui_state(state, own, network))
    changed = {name.removesuffix(".weight") for name, t in changes.items() if t.count_nonzero()}
    assert changed == set(own)
    for name, factors in layers_of(state).items():
        expected = weight_change(*factors, own[name])
        torch.testing.assert_close(changes[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_layers_and_networks_that_comfyui_does_not_know_are_named():
    a, b = torch.zeros(1, 2), torch.zeros(2, 1)
    for name in ("transformer_blocks.0.attn.to_x", "pos_embed.proj", "blocks.0"):
        state = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        with pytest.raises(UserError, match=f"adapts {name}, .* SD3Transformer2DModel"):
            comfyui_state(state, {name: 1.0}, "SD3Transformer2DModel")
    with pytest.raises(UserError, match="SanaTransformer2DModel"):
        comfyui_state({}, {}, "SanaTransformer2DModel")
    with pytest.raises(UserError, match=r"proj_out\.lora_"):
        layers_of({"proj_out.lora_magnitude_vector": torch.zeros(2)})

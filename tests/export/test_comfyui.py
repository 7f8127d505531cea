"""ComfyUI's file adds to every original layer what the diffusers LoRA adds, and to no other.

The judge is diffusers' own converter from the original checkpoints: fed with the changes of the
original layers, it must give back the changes of diffusers' layers, and leave nothing over.
"""

import pytest
import torch
from torch import nn

from flowrl.backbones.original_layers import PREFIX, comfyui_state, weight_change
from flowrl.errors import UserError

RANK, STRENGTH = 2, 1.5


class Originals(dict):
    """Changes of the original layers; of every other tensor 0. Remembers what was not asked for."""

    def pop(self, key, *default):
        return super().pop(key) if key in self else torch.zeros(21504)  # FLUX.1's widest


def network(family: str) -> nn.Module:
    """A transformer with one block of each kind, without weights."""
    import diffusers

    with torch.device("meta"):
        if family == "flux":  # as wide as FLUX.1, which the converter takes for granted
            return diffusers.FluxTransformer2DModel(
                num_layers=2, num_single_layers=1, guidance_embeds=True
            )
        return diffusers.SD3Transformer2DModel(
            sample_size=8, num_layers=3, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10,
            pos_embed_max_size=8, dual_attention_layers=(0, 1), qk_norm="rms_norm",
        )  # fmt: skip


def random_lora(family: str) -> dict[str, torch.Tensor]:
    """Factors for every linear layer; FLUX's layers take two inputs, for the converter's sake."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, layer in network(family).named_modules():
        if isinstance(layer, nn.Linear):
            inputs = 2 if family == "flux" else layer.in_features
            for key, shape in (("A", (RANK, inputs)), ("B", (layer.out_features, RANK))):
                found[f"{name}.lora_{key}.weight"] = torch.randn(shape, generator=generator)
    return found


def layers(state: dict[str, torch.Tensor]) -> list[str]:
    return sorted({name.partition(".lora_")[0] for name in state})


def comfyui_changes(made: dict[str, torch.Tensor]) -> Originals:
    """What ComfyUI's loader adds: alpha / rank up down, by the original layer's weight."""
    found, names = Originals(), {name.rpartition(".alpha")[0] for name in made if "alpha" in name}
    for name in names:
        down, up = made[f"{name}.lora_A.weight"], made[f"{name}.lora_B.weight"]
        scale = made[f"{name}.alpha"].item() / down.shape[0]
        found[f"{name.removeprefix(PREFIX)}.weight"] = weight_change(down, up, scale)
    assert len(made) == 3 * len(names)
    return found


def converted(family: str, changes: Originals) -> dict[str, torch.Tensor]:
    """The same in diffusers' names, by its converter."""
    from diffusers.loaders import single_file_utils as convert

    if family == "flux":
        return convert.convert_flux_transformer_checkpoint_to_diffusers(changes)
    return convert.convert_sd3_transformer_checkpoint_to_diffusers(changes)


def test_every_layer_changes_as_diffusers_changes_it():
    for family in ["sd3", "flux"]:
        state = random_lora(family)
        changes = comfyui_changes(comfyui_state(state, STRENGTH, family))
        found = converted(family, changes)
        assert not changes, "layers that the original does not have"
        names = layers(state)
        assert len(names) > 30
        for name in names:
            own = weight_change(
                state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"], STRENGTH
            )
            torch.testing.assert_close(found[f"{name}.weight"], own, rtol=1e-5, atol=1e-5, msg=name)


def test_layers_without_a_lora_do_not_change():
    """Only values, of each group of queries, keys and values."""
    for family in ["sd3", "flux"]:
        state = {n: t for n, t in random_lora(family).items() if ".to_v." in n or "add_v" in n}
        changes = comfyui_changes(comfyui_state(state, STRENGTH, family))
        if family == "sd3":  # which the converter measures
            changes["context_embedder.weight"] = torch.zeros(16, 12)
        found = converted(family, changes)
        changed = {name.removesuffix(".weight") for name, t in found.items() if t.count_nonzero()}
        assert changed == set(layers(state))


def test_the_keys_are_those_of_comfyuis_loader():
    made = comfyui_state(random_lora("flux"), STRENGTH, "flux")
    assert {"double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"} <= {
        name.removeprefix("diffusion_model.").removesuffix(".alpha")
        for name in made
        if name.endswith(".alpha")
    }
    fused = "diffusion_model.single_blocks.0.linear1"
    assert made[f"{fused}.lora_A.weight"].shape == (4 * RANK, 2)
    assert made[f"{fused}.lora_B.weight"].shape == (21504, 4 * RANK)
    assert made[f"{fused}.alpha"].item() == 4 * RANK * STRENGTH
    sd3 = comfyui_state(random_lora("sd3"), STRENGTH, "sd3")
    assert "diffusion_model.joint_blocks.1.x_block.attn2.qkv.lora_B.weight" in sd3


def test_layers_and_families_that_comfyui_does_not_know_are_named():
    a, b = torch.zeros(1, 2), torch.zeros(2, 1)
    for name in ("transformer_blocks.0.attn.to_x", "pos_embed.proj", "blocks.0"):
        with pytest.raises(UserError, match=f"adapts {name}, .* sd3"):
            state = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            comfyui_state(state, 1.0, "sd3")
    for family, told in (("sana", "SANA"), ("mine:Own", "'mine:Own'.* sd3, flux")):
        with pytest.raises(UserError, match=told):
            comfyui_state({}, 1.0, family)
    state = random_lora("sd3") | {"proj_out.lora_magnitude_vector": torch.zeros(2)}
    with pytest.raises(UserError, match=r"1 tensors .* the first is proj_out.lora_magnitude"):
        comfyui_state(state, 1.0, "sd3")

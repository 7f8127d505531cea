"""LoRAs of any make: read into one form, equal to what their own library makes of them."""

import json
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.backbones.lora_files import FILE, load_lora
from flowrl.backbones.lora_formats import check_fits, normalised, open_lora
from flowrl.backbones.original_layers import comfyui_state, layers_of
from flowrl.cli import main
from flowrl.errors import UserError

BLOCK = "transformer_blocks.0.attn"


@pytest.fixture(scope="module")
def peft_folder(load_tiny, tmp_path_factory):
    """A PEFT folder of the tiny SD3 with ranks and alphas of some layers' own, and its model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_out.0"],
        rank_pattern={"to_k": 2}, alpha_pattern={"transformer_blocks.1.attn.to_q": 6},
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = get_peft_model(load_tiny().transformer, config)
    folder = tmp_path_factory.mktemp("peft")
    model.save_pretrained(folder)
    return folder, model


def changes(lora) -> dict[str, torch.Tensor]:
    return {
        name: lora.strengths[name] * up @ down for name, (down, up) in layers_of(lora.state).items()
    }


def assert_same_changes(one, other):
    ours, theirs = changes(one), changes(other)
    assert ours.keys() == theirs.keys() and ours
    for name, change in ours.items():
        torch.testing.assert_close(change, theirs[name], rtol=1e-6, atol=1e-7)


def test_a_peft_folder_changes_the_weights_as_peft_does(peft_folder):
    folder, model = peft_folder
    lora, modules = open_lora(folder), dict(model.base_model.model.named_modules())
    assert len(lora.strengths) == 15
    assert sorted(set(lora.strengths.values())) == [1.5, 2.0, 4.0]  # 6 / 4, 8 / 4, 8 / 2
    for name, change in changes(lora).items():
        delta = modules[name].get_delta_weight("default")
        torch.testing.assert_close(change, delta, rtol=1e-6, atol=1e-7)


def test_ranks_and_alphas_of_single_layers_reach_diffusers(peft_folder, load_tiny):
    folder, model = peft_folder
    pipeline = load_tiny()
    load_lora(pipeline, folder)
    theirs = dict(model.base_model.model.named_modules())
    layers = [n for n, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")]
    assert layers == [n for n, m in theirs.items() if hasattr(m, "lora_A")]
    for name in layers:
        layer: SimpleNamespace = pipeline.transformer.get_submodule(name)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        assert torch.equal(delta, theirs[name].get_delta_weight("default"))


def test_a_pattern_for_the_last_layer_is_not_that_of_the_blocks_layers_of_its_name(
    load_tiny, tmp_path
):
    """FLUX.1 has `proj_out`, and one in each single block; PEFT takes keys for ends of names."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=4, target_modules=["proj_out", "to_q"], init_lora_weights=False,
        alpha_pattern={"^proj_out$": 16}, rank_pattern={"^proj_out$": 2, "to_q": 1},
        use_rslora=True,
    )  # fmt: skip
    model: Any = get_peft_model(load_tiny(family="flux").transformer, config)
    model.save_pretrained(tmp_path / "peft")
    (tmp_path / FILE).write_bytes(normalised(open_lora(tmp_path / "peft")))
    pipeline = load_tiny(family="flux")
    load_lora(pipeline, tmp_path)
    theirs = dict(model.base_model.model.named_modules())
    adapted = [n for n, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")]
    assert {"proj_out", "single_transformer_blocks.0.proj_out"} < set(adapted)
    assert adapted == [n for n, m in theirs.items() if hasattr(m, "lora_A")]
    for name in adapted:
        layer: SimpleNamespace = pipeline.transformer.get_submodule(name)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        torch.testing.assert_close(delta, theirs[name].get_delta_weight("default"))


def test_a_folder_above_the_lora_is_searched_and_several_are_an_error(peft_folder, tmp_path):
    shutil.copytree(peft_folder[0], tmp_path / "run" / "checkpoint-3" / "lora")
    expected = open_lora(tmp_path / "run" / "checkpoint-3" / "lora").path
    assert open_lora(tmp_path / "run" / "checkpoint-3").path == expected
    assert open_lora(tmp_path / "run").path == expected
    shutil.copytree(peft_folder[0], tmp_path / "run" / "checkpoint-6" / "lora")
    with pytest.raises(UserError, match="name one of checkpoint-3, checkpoint-6 in it"):
        open_lora(tmp_path / "run")


def test_comfyui_keys_come_back_as_the_layers_that_they_were_made_of(peft_folder, tmp_path):
    lora = open_lora(peft_folder[0])
    saved = tmp_path / "comfy.safetensors"
    save_file(comfyui_state(lora.state, lora.strengths, "sd3"), saved)
    assert_same_changes(open_lora(saved), lora)
    ends = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
    kohya = {}
    for name, tensor in load_file(saved).items():
        layer, end = re.fullmatch(r"diffusion_model\.(.+)\.(lora_\w\.weight|alpha)", name).groups()
        kohya[f"lora_unet_{layer.replace('.', '_')}.{ends.get(end, end)}"] = tensor
    save_file(kohya, tmp_path / "kohya.safetensors")
    found = open_lora(tmp_path / "kohya.safetensors")
    assert found.make == "kohya"
    assert_same_changes(found, lora)


FLUX_LAYERS = {  # kohya's name -> ComfyUI's, outputs and inputs
    "double_blocks_0_img_attn_qkv": ("double_blocks.0.img_attn.qkv", 96, 32),
    "img_in": ("img_in", 32, 8),
    "final_layer_adaLN_modulation_1": ("final_layer.adaLN_modulation.1", 64, 32),
}


def write_flux(folder, *, alpha: float | None) -> None:
    """The same LoRA of FLUX.1 with kohya's keys and with ComfyUI's."""
    generator = torch.Generator().manual_seed(0)
    kohya, comfyui = {}, {}
    for theirs, (ours, rows, columns) in FLUX_LAYERS.items():
        down = torch.randn(2, columns, generator=generator)
        up = torch.randn(rows, 2, generator=generator)
        kohya |= {
            f"lora_unet_{theirs}.lora_down.weight": down, f"lora_unet_{theirs}.lora_up.weight": up,
        }  # fmt: skip
        name = f"diffusion_model.{ours}"
        comfyui |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        if alpha is not None:
            kohya[f"lora_unet_{theirs}.alpha"] = torch.tensor(alpha)
            comfyui[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(kohya, folder / "kohya.safetensors")
    save_file(comfyui, folder / "comfyui.safetensors")


def test_kohyas_flux_keys_are_diffusers_converters_and_ours_agree(tmp_path):
    write_flux(tmp_path, alpha=1.0)
    ours = open_lora(tmp_path / "comfyui.safetensors")
    attention = [f"{BLOCK}.to_{letter}" for letter in "kqv"]
    assert sorted(ours.strengths) == ["norm_out.linear", *attention, "x_embedder"]
    assert_same_changes(open_lora(tmp_path / "kohya.safetensors"), ours)


def test_kohyas_flux_keys_without_alpha_warn_and_take_the_one_that_is_said(tmp_path, caplog):
    write_flux(tmp_path, alpha=None)
    file = tmp_path / "kohya.safetensors"
    plain = changes(open_lora(file))
    assert "does not say its alpha: it acts with the strength 1" in caplog.text
    caplog.clear()
    for name, change in changes(open_lora(file, alpha=6)).items():
        torch.testing.assert_close(change, 3 * plain[name])
    assert not caplog.text
    write_flux(tmp_path, alpha=1.0)
    with pytest.raises(UserError, match="was trained with alpha 1, and --lora-alpha is 99"):
        open_lora(file, alpha=99)


def test_a_file_without_its_alpha_warns_with_the_strength_unless_it_is_said(
    peft_folder, tmp_path, caplog
):
    lora = open_lora(peft_folder[0])
    alone = {k: t for k, t in lora.state.items() if k.startswith(f"{BLOCK}.to_q")}
    save_file(alone, tmp_path / "bare.safetensors")  # without diffusers' prefix, too
    assert open_lora(tmp_path / "bare.safetensors").strength == 1
    assert "bare.safetensors does not say its alpha: it acts with the strength 1" in caplog.text
    caplog.clear()
    assert open_lora(tmp_path / "bare.safetensors", alpha=8).strength == 2
    assert not caplog.text


def test_the_alpha_that_is_said_to_a_command_is_in_the_file_that_it_writes(peft_folder, tmp_path):
    lora = open_lora(peft_folder[0])
    alone = {k: t for k, t in lora.state.items() if k.startswith(f"{BLOCK}.to_q")}
    save_file(alone, tmp_path / "bare.safetensors")
    words = ["export", str(tmp_path / "bare.safetensors"), "--to", "diffusers", "-o"]
    with pytest.raises(SystemExit) as end:
        main([*words, str(tmp_path / "lora"), "--lora-alpha", "12"])
    assert not end.value.code and open_lora(tmp_path / "lora").strength == 3


def test_the_normalised_file_says_what_the_folder_said(peft_folder, tmp_path):
    lora = open_lora(peft_folder[0])
    (tmp_path / FILE).write_bytes(normalised(lora))
    again = open_lora(tmp_path)
    assert again.ready and again.strengths == lora.strengths
    assert all(torch.equal(t, again.state[name]) for name, t in lora.state.items())


def test_what_is_no_plain_lora_of_this_network_is_refused_by_name(peft_folder, load_tiny, tmp_path):
    lora = open_lora(peft_folder[0])
    with pytest.raises(UserError, match=r"of which SanaTransformer2DModel lacks \d+, transformer_"):
        check_fits(lora, load_tiny(family="sana").transformer)
    copy = tmp_path / "copy"
    shutil.copytree(peft_folder[0], copy)
    file, config = copy / "adapter_model.safetensors", copy / "adapter_config.json"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a safetensors file, or not whole"):
        open_lora(copy)
    tensors = load_file(peft_folder[0] / "adapter_model.safetensors")
    first = sorted(tensors)[0]
    save_file(tensors | {first.replace("blocks.0", "blocks.99"): tensors[first] + 1}, file)
    with pytest.raises(UserError, match="not pairs of lora_A and lora_B"):
        open_lora(copy)
    far = {
        k.replace("blocks.0.", "blocks.99."): t + 1 for k, t in tensors.items() if "blocks.0." in k
    }
    save_file(tensors | far, file)
    with pytest.raises(UserError, match=r"SD3Transformer2DModel lacks \d+, transformer_blocks.99"):
        check_fits(open_lora(copy), load_tiny().transformer)
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"use_dora": True}))
    with pytest.raises(UserError, match="sets use_dora, but flowrl takes plain LoRAs"):
        open_lora(copy)
    config.write_text(json.dumps(said | {"r": 16}))
    with pytest.raises(UserError, match="says rank 16 for"):
        open_lora(copy)
    file.unlink()
    (copy / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="holds a pickle"):
        open_lora(copy)


def test_factors_that_are_no_pair_of_matrices_are_refused_before_they_are_loaded(tmp_path):
    name = f"{BLOCK}.to_q"

    def refused(match, down, up, **others):
        factors = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        save_file(factors | others, tmp_path / FILE)
        with pytest.raises(UserError, match=match):
            open_lora(tmp_path)

    wanted = r"to_q, expected \(rank, inputs\) and \(outputs, rank\)"
    refused(wanted, torch.ones(4, 8), torch.ones(8, 3))
    refused(wanted, torch.ones(4), torch.ones(4))
    refused(wanted, torch.tensor(1.0), torch.tensor(1.0))
    two = {f"{name}.alpha": torch.ones(2)}
    refused("beside the transformer's LoRA", torch.ones(4, 8), torch.ones(8, 4), **two)


def test_a_configuration_without_numbers_is_refused_by_its_entry(peft_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(peft_folder[0], copy)
    config = copy / "adapter_config.json"
    said = json.loads(config.read_text())

    def refused(match, **entries):
        config.write_text(json.dumps(said | entries))
        with pytest.raises(UserError, match=match):
            open_lora(copy)

    for value in ("8", None, float("nan"), 0):
        refused("has lora_alpha = .*, expected a finite number other than 0", lora_alpha=value)
    refused("has r = '4', expected a whole number from 1", r="4")
    refused(r"rank_pattern = \[4\], expected an object", rank_pattern=[4])
    refused(r"alpha_pattern\['\('\], which is no regular", alpha_pattern={"(": 2})


def test_a_name_on_the_hub_is_its_folder_there_at_a_revision(peft_folder, monkeypatch, tmp_path):
    from huggingface_hub.errors import EntryNotFoundError

    asked = []

    def download(name, path, revision=None):
        asked.append((name, path, revision))
        if not path.startswith("checkpoint-3/lora/adapter"):
            raise EntryNotFoundError("404")
        return str(peft_folder[0] / path.rpartition("/")[2])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    lora = open_lora("me/a-lora/checkpoint-3@v1")
    assert lora.path == peft_folder[0] / "adapter_model.safetensors"
    assert asked[-1] == ("me/a-lora", "checkpoint-3/lora/adapter_model.safetensors", "v1")
    with pytest.raises(UserError, match="no LoRA at ../nothing/x: give"):
        open_lora("../nothing/x")
    with pytest.raises(UserError, match="name its subfolder as me/a-lora/SUBFOLDER"):
        open_lora("me/a-lora")

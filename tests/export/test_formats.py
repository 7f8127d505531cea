"""What `flowrl export` writes is loaded by others, and holds the policy's weights."""

import stat

import diffusers
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file

from flowrl.backbones.lora_files import load_lora, save_lora
from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.original_layers import layers_of, weight_change
from flowrl.backbones.small import small_folder
from flowrl.config import config_yaml
from flowrl.errors import UserError
from flowrl.export.formats import export_lora, export_merged

COMFYUI = (
    "StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline", "QwenImagePipeline",
    "ZImagePipeline",
)  # fmt: skip


QUICK = ("FluxPipeline", "Flux2KleinPipeline", "LongCatImagePipeline")  # without --slow


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*COMFYUI, "SanaPipeline", "LongCatImagePipeline")
    ]
)
def run(request, tiny_config, tmp_path):
    """A class, a folder with a pipeline of it, and a run's folder: its LoRA and recipe."""
    base = small_folder(getattr(diffusers, request.param), tmp_path / "base")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(base)
    network = pipeline.transformer
    ends = ("to_q", "to_v", "proj_mlp")
    layers = [n for n, _ in network.named_modules() if n.endswith(ends)]
    if request.param == "FluxPipeline":  # whose converter takes single blocks' width for granted
        layers = [n for n in layers if not n.startswith("single")]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=layers), network)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    folder = tmp_path / "run"
    save_lora(pipeline, folder, adapter="default")
    config = tiny_config(pipeline={"path": str(base), "dtype": "fp32"})
    (folder / "config.yaml").write_text(config_yaml(config))
    return request.param, base, folder


def test_kohyas_keys_are_read_back_and_those_of_flux_by_diffusers_own_converter(run, tmp_path):
    name, base, folder = run
    kind, lora, out = getattr(diffusers, name), open_lora(folder), tmp_path / "kohya.safetensors"
    if name not in COMFYUI:
        with pytest.raises(UserError, match="knows ComfyUI's names"):
            export_lora(str(folder), out, keys="kohya")
        return
    tensors = load_file(export_lora(str(folder), out, keys="kohya"))
    again = open_lora(export_lora(str(out), tmp_path / "kohya", base=str(base)))
    assert all(torch.equal(tensor, lora.state[n]) for n, tensor in again.state.items())
    if "Flux" not in name:
        return
    assert all(key.startswith("lora_unet_") and key.count(".") <= 2 for key in tensors)
    read = layers_of({
        key.removeprefix("transformer."): tensor
        for key, tensor in kind.lora_state_dict(tensors).items()
    })  # fmt: skip
    for layer, (down, up) in read.items():
        expected = torch.zeros(len(up), down.shape[1])
        if layer in lora.layers:  # of a stack others are there too, and 0
            expected = weight_change(*lora.layers[layer], lora.scales[layer])
        torch.testing.assert_close(up @ down, expected, rtol=1e-5, atol=1e-5)
    assert lora.layers.keys() <= read.keys()


def test_every_form_of_a_run_holds_its_lora(run, tmp_path):
    name, base, folder = run
    lora = open_lora(folder)
    path = export_lora(str(folder), tmp_path / "copy")
    assert path.read_bytes() == (folder / FILE).read_bytes() and path.name == FILE
    with pytest.raises(UserError, match="exists already"):
        export_lora(str(folder), tmp_path / "copy")
    # Merged: the whole pipeline, whose weights are the sum.
    merged = export_merged(str(folder), tmp_path / "merged", base=None, revision=None, dtype=None)
    assert stat.S_IMODE(merged.stat().st_mode) == 0o755
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert str(tmp_path) not in (merged / "model_index.json").read_text()
    before, after = (
        diffusers.DiffusionPipeline.from_pretrained(p).transformer for p in (base, merged)
    )
    weights = after.state_dict()
    assert weights.keys() == before.state_dict().keys()
    changed = {k for k, t in before.state_dict().items() if not torch.equal(t, weights[k])}
    assert changed == {f"{layer}.weight" for layer in lora.scales}
    # ComfyUI: its keys, and back with the pipeline.
    if name not in COMFYUI:
        with pytest.raises(UserError, match=type(before).__name__):
            export_lora(str(folder), tmp_path / "a.safetensors", keys="comfyui")
        return
    comfyui = export_lora(str(folder), tmp_path / "out", keys="comfyui")
    assert comfyui == tmp_path / "out" / "run.safetensors"
    assert all(key.startswith("diffusion_model.") for key in load_file(comfyui))
    again = open_lora(export_lora(str(comfyui), tmp_path / "again", base=str(base)))
    assert again.scales == lora.scales
    assert all(torch.equal(tensor, lora.state[name]) for name, tensor in again.state.items())
    with pytest.raises(UserError, match="add --base"):
        export_lora(str(comfyui), tmp_path / "third")


def test_the_alpha_that_is_given_to_a_command_is_in_the_file_that_it_writes(
    tmp_path, load_tiny, flowrl
):
    name = "transformer.transformer_blocks.0.attn.to_q"
    bare = tmp_path / "bare.safetensors"
    tensors = {"lora_A": torch.ones(4, 128), "lora_B": torch.ones(128, 4)}
    save_file({f"{name}.{side}.weight": t for side, t in tensors.items()}, bare)
    words = ("export", bare, "--to", "diffusers", "-o", tmp_path / "lora", "--lora-alpha", "12")
    assert flowrl(*words)[0] == 0 and open_lora(tmp_path / "lora").scale == 3
    assert load_lora(load_tiny(), tmp_path / "lora") == 1

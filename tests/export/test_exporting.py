"""What `flowrl export` writes is loaded by others, and draws the policy's images."""

import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.backbones.lora_files import FILE, load_lora, merge_lora, read_lora, save_lora
from flowrl.backbones.original_layers import layers_of, weight_change
from flowrl.config import config_yaml
from flowrl.errors import UserError
from flowrl.export.formats import export_comfyui, export_diffusers, export_merged

PROMPTS = ["a red circle", "two stars"]
SIZE = {"sd3": {}, "flux": {"height": 64, "width": 64}}
SIZE["sana"] = SIZE["flux"] | {"use_resolution_binning": False}


def images(pipeline, family: str) -> torch.Tensor:
    noise = [torch.Generator().manual_seed(i) for i in range(2)]
    options = {"guidance_scale": 1.0, "num_inference_steps": 2, "max_sequence_length": 12}
    return pipeline(PROMPTS, generator=noise, output_type="pt", **options, **SIZE[family]).images


def trained(pipeline, folder, config) -> None:
    """A run's folder: its LoRA with random factors on attention layers, and its recipe."""
    from peft import LoraConfig

    network = pipeline.transformer
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    network.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=targets), "default")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    save_lora(pipeline, folder, adapter="default")
    (folder / "config.yaml").write_text(config_yaml(config))


@pytest.fixture
def one(load_tiny, tiny_config, tmp_path):
    """The folder of a run of SD3."""
    trained(load_tiny(), tmp_path, tiny_config())
    return tmp_path


@pytest.fixture(params=["sd3", "flux", "sana"])
def run(request, load_tiny, tiny_config, tiny_pipeline_path, tmp_path):
    """family, folder of a run, its pipeline with the LoRA."""
    family = request.param
    path = tiny_pipeline_path if family == "sd3" else f"tiny-{family}"
    config = tiny_config(pipeline={"path": path, "backbone": family, "dtype": "fp32"})
    pipeline = load_tiny(family=family)
    for parameter in pipeline.transformer.parameters():  # layers at zero would hide a change
        if parameter.count_nonzero() == 0:
            parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    trained(pipeline, tmp_path / "run", config)
    return family, tmp_path / "run", pipeline


def test_a_merged_pipeline_draws_the_policys_images_with_nothing_attached(
    run, tmp_path, monkeypatch
):
    from diffusers import DiffusionPipeline

    family, folder, policy = run
    base = _without_lora(policy)
    monkeypatch.setattr("flowrl.export.formats.load_pipeline", lambda path, **how: base)
    to = export_merged(str(folder), tmp_path / "merged", base=None, revision=None, dtype=None)
    assert not list(to.rglob("*lora*")) and list(to.rglob("transformer/*.safetensors"))
    assert stat.S_IMODE(to.stat().st_mode) == 0o755
    fresh = DiffusionPipeline.from_pretrained(to)
    fresh.set_progress_bar_config(disable=True)
    assert not any("lora" in name for name, _ in fresh.transformer.named_parameters())
    own = images(policy, family)
    # Merging rounds each weight once; after all steps that is up to a fiftieth of a grey level.
    torch.testing.assert_close(images(fresh, family), own, rtol=0, atol=1e-4)
    policy.transformer.disable_adapters()
    assert (images(policy, family) - own).abs().max() > 1e-3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert str(tmp_path) not in (to / "model_index.json").read_text()
    # A ComfyUI file is written for the families that ComfyUI loads.
    if family == "sana":
        with pytest.raises(UserError, match="ComfyUI has no LoRA path for SANA"):
            export_comfyui(str(folder), tmp_path / "a.safetensors", backbone=None)
        return
    path = export_comfyui(str(folder), tmp_path / "out", backbone=None)
    assert path == tmp_path / "out" / "run.safetensors"
    alphas = {t.item() / 2 for name, t in load_file(path).items() if name.endswith(".alpha")}
    assert alphas == {1.5, 4.5}  # of layers kept whole, and of three in one


def _without_lora(pipeline):
    """The same pipeline, its transformer a copy without the adapter."""
    copy = type(pipeline.transformer).from_config(pipeline.transformer.config)
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in pipeline.transformer.state_dict().items()
        if "lora_" not in name
    }
    copy.load_state_dict(state)
    return type(pipeline)(**pipeline.components | {"transformer": copy.eval()})


def test_merging_adds_in_fp32_and_rounds_once(load_tiny, one):
    base, merged = load_tiny("bf16").transformer, load_tiny("bf16")
    state, strength = read_lora(one)
    assert merge_lora(merged, one) == len(layers_of(state)) > 10
    weights = merged.transformer.state_dict()
    for name, (down, up) in layers_of(state).items():
        exact = base.get_submodule(name).weight.float() + weight_change(down, up, strength)
        assert torch.equal(weights[f"{name}.weight"], exact.bfloat16())


def test_a_network_that_cannot_take_the_lora_is_refused_unchanged(load_tiny, one):
    pipeline = load_tiny()
    before = {k: t.clone() for k, t in pipeline.transformer.state_dict().items()}
    last = pipeline.transformer.transformer_blocks[4].attn.to_v
    last.weight = torch.nn.Parameter(last.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match="attn.to_v of SD3Transformer2DModel is quantised"):
        merge_lora(pipeline, one)
    last.weight = torch.nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(UserError, match="by 128 x 128, but it is 8 x 8"):
        merge_lora(pipeline, one)
    first = "transformer_blocks.0.attn.to_q.weight"
    assert torch.equal(pipeline.transformer.state_dict()[first], before[first])
    with pytest.raises(UserError, match="which SanaTransformer2DModel has not"):
        merge_lora(load_tiny(family="sana"), one)


def test_a_file_alone_needs_its_family_said_where_layers_do_not_tell(one, tmp_path):
    (one / "config.yaml").unlink()
    with pytest.raises(UserError, match="add --backbone sd3 or --backbone flux"):
        export_comfyui(str(one / FILE), one / "a.safetensors", backbone=None)
    assert export_comfyui(str(one), one / "a.safetensors", backbone="sd3").is_file()
    with pytest.raises(UserError, match="add --base PIPELINE"):
        export_merged(str(one), one / "m", base=None, revision=None, dtype=None)

    def write(*layers: str) -> str:
        tensors = {}
        for layer in layers:
            name = f"transformer.transformer_blocks.0.{layer}.to_q"
            tensors[f"{name}.lora_A.weight"] = torch.zeros(2, 4)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(4, 2)
        header = {"transformer.r": 2, "transformer.lora_alpha": 2}
        path = tmp_path / "lora.safetensors"
        save_file(tensors, path, {"lora_adapter_metadata": json.dumps(header)})
        return str(path)

    with pytest.raises(UserError, match="SD3's or SANA's: add --backbone sd3 or --backbone sana"):
        export_comfyui(write("attn2"), tmp_path / "a.safetensors", backbone=None)
    export_comfyui(write("attn", "attn2"), tmp_path / "c.safetensors", backbone=None)
    with pytest.raises(UserError, match="ComfyUI has no LoRA path for SANA"):
        export_comfyui(write("attn1", "attn2"), tmp_path / "b.safetensors", backbone=None)


def test_a_copy_for_diffusers_is_the_file_and_says_its_strength(load_tiny, one, tmp_path):
    path = export_diffusers(str(tmp_path), tmp_path / "copy")
    assert path.read_bytes() == (tmp_path / FILE).read_bytes() and path.name == FILE
    assert load_lora(load_tiny(), tmp_path / "copy") > 10
    with pytest.raises(UserError, match="is there already"):
        export_diffusers(str(tmp_path), tmp_path / "copy")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(path), bare)
    export_diffusers(str(bare), tmp_path / "other", alpha=3)
    assert read_lora(tmp_path / "other")[1] == read_lora(path)[1] == 1.5
    with pytest.raises(UserError, match="was trained with alpha 3, and --lora-alpha is 4"):
        export_diffusers(str(path), tmp_path / "third", alpha=4)


def test_the_pipeline_of_the_run_is_loaded_as_the_run_loaded_it(
    load_tiny, tiny_config, tmp_path, monkeypatch
):
    config = tiny_config(pipeline={"path": "a/b", "revision": "abc", "dtype": "bf16"})
    trained(load_tiny(), tmp_path, config)
    asked = []

    def load(path, **how):
        asked.append((path, how["dtype"], how["revision"]))
        raise UserError("far enough")

    monkeypatch.setattr("flowrl.export.formats.load_pipeline", load)
    for base, dtype in ((None, None), ("c/d", "fp16")):
        with pytest.raises(UserError, match="far enough"):
            export_merged(str(tmp_path), tmp_path / "m", base=base, revision=None, dtype=dtype)
    assert asked == [("a/b", "bf16", "abc"), ("c/d", "fp16", None)]

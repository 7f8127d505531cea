"""A LoRA of any pipeline class: saved, loaded by diffusers and by flowrl, merged; or refused."""

import inspect
import json
import logging
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn

from flowrl.backbones.lora_files import (
    FILE,
    count_layers,
    file_prefix,
    fit_lora,
    load_lora,
    merge_lora,
    save_lora,
    unload_lora,
)
from flowrl.backbones.lora_formats import open_lora
from flowrl.backbones.original_layers import comfyui_state, kohya_state, layers_of, weight_change
from flowrl.backbones.small import small_pipeline
from flowrl.errors import UserError

# Their own LoRA loader, and where ComfyUI has keys; through the network; through PEFT alone.
CLASSES = (
    "StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline", "QwenImagePipeline",
    "ZImagePipeline", "SanaPipeline", "Krea2Pipeline", "BriaPipeline", "PRXPipeline",
)  # fmt: skip
QUICK = ("StableDiffusion3Pipeline", "Flux2KleinPipeline", "BriaPipeline")  # without --slow


def small(name: str) -> Any:
    pipeline = small_pipeline(getattr(diffusers, name))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any) -> torch.Tensor:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    wanted = {"guidance_scale": 1.0, "max_sequence_length": 64, "height": 64, "width": 64}
    call = {name: value for name, value in wanted.items() if name in parameters}
    call |= {"use_resolution_binning": False} if "use_resolution_binning" in parameters else {}
    noise = torch.Generator().manual_seed(0)
    return pipeline(
        prompt=["a red circle"], num_inference_steps=2, output_type="pt", generator=noise, **call
    ).images


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CLASSES
    ],
)
def trained(request, tmp_path_factory):
    """A class, the folder of a LoRA with alpha other than rank, its pipeline, and its image."""
    pipeline = small(request.param)
    network = pipeline.transformer
    for parameter in network.parameters():  # layers at zero would hide a change
        if not parameter.any():
            parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    base = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    blocks = [n for n, m in network.named_modules() if isinstance(m, nn.Linear) and ".0." in n]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=blocks[-6:])
    inject_adapter_in_model(config, network)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp(request.param)
    save_lora(pipeline, folder, adapter="default")

    def fresh() -> Any:
        pipeline = small(request.param)
        pipeline.transformer.load_state_dict(base)
        return pipeline

    return request.param, folder, draw(pipeline), fresh


def test_diffusers_itself_loads_the_file_and_draws_the_policys_image(trained):
    name, folder, image, fresh = trained
    pipeline = fresh()
    assert file_prefix(type(pipeline)) == (
        "" if name.startswith(("Bria", "PRX")) else "transformer."
    )
    assert not torch.allclose(draw(pipeline), image, atol=1e-3)
    if file_prefix(type(pipeline)):
        pipeline.load_lora_weights(folder, weight_name=FILE)
    elif hasattr(pipeline.transformer, "load_lora_adapter"):
        pipeline.transformer.load_lora_adapter(folder, prefix=None, weight_name=FILE)
    else:
        load_lora(pipeline, folder)
    torch.testing.assert_close(draw(pipeline), image, rtol=0, atol=4e-5)


def test_flowrl_loads_unloads_and_merges_it_without_a_warning(trained, caplog, capfd):
    name, folder, image, fresh = trained
    pipeline = fresh()
    before = draw(pipeline)
    capfd.readouterr()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load_lora(pipeline, folder) == count_layers(pipeline.transformer) == 6
    assert not caplog.text and not "".join(capfd.readouterr())
    torch.testing.assert_close(draw(pipeline), image, rtol=0, atol=4e-5)
    with pytest.raises(UserError, match="another LoRA already"):
        load_lora(pipeline, folder)
    unload_lora(pipeline)
    torch.testing.assert_close(draw(pipeline), before, rtol=0, atol=1e-6)
    assert merge_lora(pipeline, folder) == 6
    torch.testing.assert_close(draw(pipeline), image, rtol=0, atol=1e-3)


def test_the_layers_are_recognised_under_every_programs_names(trained, tmp_path):
    name, folder, _, fresh = trained
    pipeline, lora = fresh(), open_lora(folder)
    network = pipeline.transformer
    layers, kind = layers_of(lora.state), type(network).__name__
    plain, kohya = ("lora_A", "lora_B"), ("lora_down", "lora_up")
    files = []
    for form, ends in (
        ("{}", plain),
        ("_orig_mod.module.{}", ("lora_A.default", "lora_B.default")),
        ("lora_unet_{}", kohya),
        ("lora_transformer_{}", kohya),
        ("transformer.{}", kohya),
        ("model.diffusion_model.{}", plain),
        ("base_model.model._fsdp_wrapped_module.{}", plain),
        ("transformer.{}", ("lora.down", "lora.up")),
        ("unet.{}", ("lora_linear_layer.down", "lora_linear_layer.up")),
    ):
        tensors = {}
        for layer, factors in layers.items():
            key = form.format(layer.replace(".", "_") if form.startswith("lora_") else layer)
            tensors |= {f"{key}.{e}.weight": t for e, t in zip(ends, factors, strict=True)}
            tensors[f"{key}.alpha"] = torch.tensor(3.0)
        files.append(tensors)
    if name in CLASSES[:5]:
        original = comfyui_state(lora.state, lora.scales, kind)
        files += [original, kohya_state(original)]
    for tensors in files:
        save_file(tensors, tmp_path / FILE)
        fitted = fit_lora(open_lora(tmp_path), network, type(pipeline))
        assert fitted.scales == lora.scales
        assert all(torch.equal(tensor, lora.state[n]) for n, tensor in fitted.state.items())


def test_names_without_a_map_are_refused_until_diffusers_wrote_them_anew(tmp_path):
    """The names are those of Krea 2's own code, which flowrl leaves to diffusers."""
    ours, theirs = small("Krea2Pipeline"), small("Krea2Pipeline")
    generator, tensors = torch.Generator().manual_seed(0), {}
    names = {"attn.wq": "attn.to_q", "attn.wk": "attn.to_k", "mlp.up": "ff.up"}
    for layer, own in names.items():
        module: Any = ours.transformer.get_submodule(f"transformer_blocks.0.{own}")
        for side, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
            key = f"diffusion_model.blocks.0.{layer}.lora_{side}.weight"
            tensors[key] = torch.randn(shape, generator=generator)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(UserError, match=f"{FILE} .* Krea2Transformer2DModel lacks 3, blocks.0"):
        fit_lora(open_lora(tmp_path), ours.transformer, type(ours))
    theirs.load_lora_weights(tmp_path, weight_name=FILE)
    theirs.transformer.save_lora_adapter(tmp_path / "again", "default_0")
    assert load_lora(ours, tmp_path / "again") == 3
    torch.testing.assert_close(draw(ours), draw(theirs), rtol=0, atol=1e-6)


def test_a_lora_with_nan_is_not_written(load_tiny, tmp_path):
    pipeline = load_tiny()
    pipeline.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"]), "default")
    parameter = next(p for n, p in pipeline.transformer.named_parameters() if "lora_B" in n)
    parameter.data[0] = float("nan")
    with pytest.raises(UserError, match="NaN"):
        save_lora(pipeline, tmp_path / "bad", adapter="default")
    assert not (tmp_path / "bad").exists()


def test_a_pattern_for_the_last_layer_is_not_that_of_the_blocks_layers_of_its_name(
    load_tiny, tmp_path
):
    """FLUX.1 has `proj_out`, and one in each single block; PEFT takes keys for ends of names."""
    from peft import get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=4, target_modules=["proj_out", "to_q"], init_lora_weights=False,
        alpha_pattern={"^proj_out$": 16}, rank_pattern={"^proj_out$": 2, "to_q": 1},
        use_rslora=True,
    )  # fmt: skip
    model: Any = get_peft_model(load_tiny(family="flux").transformer, config)
    model.save_pretrained(tmp_path)
    pipeline = load_tiny(family="flux")
    load_lora(pipeline, tmp_path)
    theirs = dict(model.base_model.model.named_modules())
    adapted = [n for n, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")]
    assert {"proj_out", "single_transformer_blocks.0.proj_out"} < set(adapted)
    assert adapted == [n for n, m in theirs.items() if hasattr(m, "lora_A")]
    for name in adapted:
        layer: Any = pipeline.transformer.get_submodule(name)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        torch.testing.assert_close(delta, theirs[name].get_delta_weight("default"))


def pair(name: str, width: int = 128) -> dict[str, torch.Tensor]:
    tensors = {"A": torch.ones(4, width), "B": torch.ones(width, 4)}
    return {f"transformer.{name}.lora_{side}.weight": t for side, t in tensors.items()}


BLOCK = "transformer_blocks.0.attn.to_q"


def test_a_lora_of_another_pipeline_is_refused_by_its_layers_and_changes_nothing(
    load_tiny, tmp_path
):
    pipeline = load_tiny()
    before = {k: t.clone() for k, t in pipeline.transformer.state_dict().items()}
    for tensors, words in (
        (pair("no_blocks.0.attn.to_q"), r"lacks 1, no_blocks\.0\.attn\.to_q"),
        (pair(BLOCK) | pair("transformer_blocks.99.attn.to_q"), r"lacks 1, transformer_blocks\.99"),
        (pair(BLOCK, width=64), "by 64 x 64, but it is 128 x 128"),
    ):
        save_file(tensors, tmp_path / FILE)
        for use in (load_lora, merge_lora):
            with pytest.raises(UserError, match=f"{FILE} .*{words}"):
                use(pipeline, tmp_path)
    last = pipeline.transformer.transformer_blocks[1].attn.to_v
    save_file(pair(BLOCK) | pair("transformer_blocks.1.attn.to_v"), tmp_path / FILE)
    last.weight = nn.Parameter(last.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match="cannot be folded into weights of 8 or 4 bits"):
        merge_lora(pipeline, tmp_path)
    last.weight = nn.Parameter(before["transformer_blocks.1.attn.to_v.weight"])
    after = pipeline.transformer.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_merging_adds_in_fp32_and_rounds_once(load_tiny, tmp_path):
    header = {"transformer.r": 4, "transformer.lora_alpha": 0.01}
    save_file(pair(BLOCK), tmp_path / FILE, {"lora_adapter_metadata": json.dumps(header)})
    base, merged = load_tiny("bf16").transformer, load_tiny("bf16")
    assert merge_lora(merged, tmp_path) == 1
    lora = open_lora(tmp_path)
    change = weight_change(*lora.layers[BLOCK], lora.scale)
    exact = base.get_submodule(BLOCK).weight.float() + change
    assert torch.equal(merged.transformer.get_submodule(BLOCK).weight, exact.bfloat16())

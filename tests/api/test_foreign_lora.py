"""A LoRA that PEFT trained and saved draws PEFT's own pictures, through every command."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import api
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.loading import load_pipeline
from flowrl.errors import UserError
from flowrl.utils.distributed import Runtime

TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
TARGETS += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
CALL = {"num_inference_steps": 3, "guidance_scale": 1.0, "max_sequence_length": 12}
EVALUATION = {
    "prompts": "tiny:geneval:test", "num_images": 4, "num_inference_steps": 3, "batch_size": 4,
}  # fmt: skip
LORA = {"rank": 4, "alpha": 8, "targets": TARGETS}


@pytest.fixture(scope="module")
def trained(load_tiny, tmp_path_factory):
    """checkpoint-3/lora of a PEFT training: strength 2, three steps towards random velocities."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    pipeline = load_tiny()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights="gaussian")
    model = get_peft_model(pipeline.transformer, config)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    with torch.no_grad():
        texts = pipeline.encode_prompt("a red star", None, None, max_sequence_length=12)
    for _ in range(3):
        x = torch.randn(1, pipeline.transformer.config.in_channels, 16, 16)
        v = model(
            hidden_states=x, timestep=torch.tensor([500.0]), encoder_hidden_states=texts[0],
            pooled_projections=texts[2], return_dict=False,
        )[0]  # fmt: skip
        (v - torch.randn_like(v)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    root = tmp_path_factory.mktemp("published")
    model.save_pretrained(root / "checkpoint-3" / "lora")
    return root


@pytest.fixture
def reference(trained, load_tiny):
    """The pipeline with the LoRA as PEFT itself loads it."""
    from peft import PeftModel

    pipeline = load_tiny()
    PeftModel.from_pretrained(pipeline.transformer, trained / "checkpoint-3" / "lora")
    return pipeline


def pictures(pipeline, seeds: int = 2) -> list[np.ndarray]:
    noise = (torch.Generator().manual_seed(seed) for seed in range(seeds))
    return [np.asarray(pipeline("a red star", generator=g, **CALL).images[0]) for g in noise]


def drawn(folder) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]


def test_sample_draws_what_peft_draws_and_not_what_the_base_draws(
    trained, reference, load_tiny, tiny_pipeline_path, tmp_path, flowrl
):
    words = ["sample", tiny_pipeline_path, "a red star", "--lora", trained, "--count", "2"]
    words += ["--steps", 3, "--guidance", 1, "--max-sequence-length", 12, "-o", tmp_path]
    assert flowrl(*words)[0] == 0
    found, expected = drawn(tmp_path), pictures(reference)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    base = pictures(load_tiny())
    assert not any(np.array_equal(a, b) for a, b in zip(found, base, strict=True))


def test_training_that_starts_from_it_starts_with_pefts_pictures(
    trained, reference, tiny_config, load_tiny
):
    own = tiny_config(evaluation=EVALUATION, lora=LORA | {"init_from": str(trained)})
    given = ProvidedObjects(pipeline=load_tiny())
    learner = build_learner(own, Runtime(device="cpu"), given)
    found = pictures(learner.policy.backbone.pipeline)
    assert all(np.array_equal(a, b) for a, b in zip(found, pictures(reference), strict=True))
    weaker = tiny_config(lora=LORA | {"init_from": str(trained), "alpha": 4})
    with pytest.raises(UserError, match="alpha / rank = 2"):
        build_learner(weaker, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))


def test_what_export_writes_loads_with_diffusers_and_draws_the_same(
    trained, reference, load_tiny, tiny_pipeline_path, tmp_path, flowrl
):
    expected = pictures(reference)
    base = ["--base", tiny_pipeline_path]
    for form, place, more in (
        ("diffusers", "lora", []),
        ("comfyui", "comfyui.safetensors", base),
        ("merged", "merged", [*base, "--dtype", "fp32"]),
    ):
        assert flowrl("export", trained, "--to", form, "-o", tmp_path / place, *more)[0] == 0
    pipeline, back = load_tiny(), load_tiny()
    pipeline.load_lora_weights(tmp_path / "lora")
    api.load_lora(back, tmp_path / "comfyui.safetensors")
    for loaded in (pipeline, back):
        assert all(np.array_equal(a, b) for a, b in zip(pictures(loaded), expected, strict=True))
    whole = load_pipeline(str(tmp_path / "merged"), dtype="fp32", device="cpu")
    off = [np.abs(a.astype(int) - b) for a, b in zip(pictures(whole), expected, strict=True)]
    assert max(o.max() for o in off) <= 1  # one sum of weights, rounded in another order


def test_every_command_refuses_a_damaged_or_foreign_file_before_anything_is_loaded_or_drawn(
    trained, tiny_config, monkeypatch, tmp_path, flowrl
):
    def never(*args, **how):
        raise AssertionError("something was loaded or drawn")

    monkeypatch.setattr("flowrl.training.evaluate.Evaluator.__call__", never)
    source = trained / "checkpoint-3" / "lora"
    sana = {"path": "tiny-sana"}
    with pytest.raises(UserError, match="SanaTransformer2DModel lacks"):
        api.evaluate(tiny_config(pipeline=sana, evaluation=EVALUATION), lora=str(source))
    monkeypatch.setattr("flowrl.evaluation.drawing.load_pipeline", never)
    monkeypatch.setattr("flowrl.assembly.learner.build_pipeline", never)
    cut, out = tmp_path / "cut", tmp_path / "out"
    shutil.copytree(source, cut)
    file = cut / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for words in (
        ["sample", "tiny-sd3", "a red star", "--lora", cut, "-o", out],
        ["export", cut, "--to", "diffusers", "-o", out],
    ):
        code, _, err = flowrl(*words)
        assert code and "not whole" in err
    config = tiny_config(evaluation=EVALUATION, lora=LORA)
    started = tiny_config(lora=LORA | {"init_from": str(cut)})
    for use in (
        lambda: build_learner(started, Runtime(device="cpu"), ProvidedObjects()),
        lambda: api.evaluate(config, lora=str(cut)),
    ):
        with pytest.raises(UserError, match="not whole"):
            use()
    assert not out.exists()

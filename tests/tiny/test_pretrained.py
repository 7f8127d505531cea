"""The built-in pipelines as a user meets them: loaded by diffusers, called with a plain prompt."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.prompts.records import load_prompts
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.utils.images import to_tensor

SMALL = {"height": 64, "width": 64}


@dataclass(frozen=True)
class Tiny:
    """Classes of the parts, the encoders in their order, and what a call must say of the size."""

    pipeline: str
    transformer: str
    vae: str
    scheduler: str
    encoders: list[str]
    channels: int
    size: dict[str, Any] = field(default_factory=dict)


PARTS = {
    "tiny-sd3": Tiny(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        "AutoencoderKL",
        "FlowMatchEulerDiscreteScheduler",
        ["CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"],
        16,
    ),
    "tiny-flux": Tiny(
        "FluxPipeline",
        "FluxTransformer2DModel",
        "AutoencoderKL",
        "FlowMatchEulerDiscreteScheduler",
        ["CLIPTextModel", "T5EncoderModel"],
        16,
        SMALL,
    ),
    "tiny-sana": Tiny(
        "SanaPipeline",
        "SanaTransformer2DModel",
        "AutoencoderDC",
        "DPMSolverMultistepScheduler",
        ["Gemma2Model"],
        32,
        SMALL | {"use_resolution_binning": False},
    ),
}


def test_every_built_in_pipeline_is_looked_at():
    assert set(PARTS) == set(TINY)


@pytest.fixture(scope="module", params=TINY)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name):
    return Path(pipeline_path(name))


@pytest.fixture(scope="module")
def pipeline(folder):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def strict_score(pipeline, tags: list[str], count: int, **call) -> float:
    records = [p for tag in tags for p in load_prompts(f"tiny:{tag}:test", limit=count)]
    generators = [torch.Generator().manual_seed(i) for i in range(len(records))]
    texts = [p.text for p in records]
    images = pipeline(texts, generator=generators, **call).images
    spec = RewardSpec(name="strict", reward=load_reward("geneval", {"mode": "strict"}))
    result = score([spec], to_tensor(images), texts, [p.metadata for p in records])
    return result.scores.mean().item()


def test_it_is_stored_in_half_precision_within_8_megabytes(folder):
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 8_000_000
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}


def test_its_parts_are_diffusers_own_classes(name, folder, pipeline):
    parts = PARTS[name]
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == parts.pipeline
    assert type(pipeline.transformer).__name__ == parts.transformer
    assert type(pipeline.vae).__name__ == parts.vae
    assert type(pipeline.scheduler).__name__ == parts.scheduler
    assert pipeline.vae.config.latent_channels == parts.channels
    assert pipeline.vae.config.scaling_factor
    assert parts.channels == 32 or pipeline.vae.config.shift_factor  # SANA's has none
    encoders = [v for k, v in pipeline.components.items() if k.startswith("text_encoder")]
    assert [type(e).__name__ for e in encoders] == parts.encoders


def test_its_schedule_is_that_of_the_checkpoints_it_stands_for(name, pipeline):
    config = pipeline.scheduler.config
    if name == "tiny-sana":
        assert (config.flow_shift, config.use_flow_sigmas) == (3.0, True)
        assert config.prediction_type == "flow_prediction"
    else:
        assert (config.shift, config.use_dynamic_shifting) == (3.0, name == "tiny-flux")


def test_a_plain_call_draws_one_picture_of_64_pixels(name, pipeline):
    (image,) = pipeline("a red circle", num_inference_steps=2, **PARTS[name].size).images
    assert image.size == (64, 64)


def test_it_draws_right_at_the_presets_short_text_length(name, pipeline):
    call = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 12}
    tags = ["single_object", "two_object", "colors"]
    drawn = strict_score(pipeline, tags, 20, **PARTS[name].size, **call)
    assert drawn >= 0.3  # noise scores 0, pictures drawn for another prompt at most 0.01


def test_it_draws_right_as_diffusers_calls_it_by_default(name, pipeline):
    assert strict_score(pipeline, ["colors", "two_object"], 6, **PARTS[name].size) >= 0.3


def test_its_card_states_the_scores_and_the_licence(folder):
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "scripts/pretrain_tiny" in card
    for kind in ("single_object", "counting", "position", "ocr"):
        assert f"| {kind} |" in card

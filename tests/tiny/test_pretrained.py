"""The built-in pipeline as a user meets it: loaded by diffusers, called with a plain prompt."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from flowrl.pictures import to_tensor
from flowrl.pipelines import pipeline_path
from flowrl.prompts import load_prompts
from flowrl.reward import RewardSpec, load_reward
from flowrl.scoring import score
from flowrl.tiny.sd3 import SHIFT

FOLDER = Path(pipeline_path("tiny-sd3"))


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(FOLDER)
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


def test_it_is_stored_in_half_precision_within_8_megabytes():
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) <= 8_000_000
    for path in FOLDER.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}


def test_its_parts_are_diffusers_own_classes(pipeline):
    index = json.loads((FOLDER / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert type(pipeline.transformer).__name__ == "SD3Transformer2DModel"
    assert type(pipeline.vae).__name__ == "AutoencoderKL"
    assert type(pipeline.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert pipeline.scheduler.config.shift == SHIFT
    assert pipeline.vae.config.latent_channels == 16
    assert pipeline.vae.config.shift_factor and pipeline.vae.config.scaling_factor
    encoders = [type(pipeline.text_encoder).__name__, type(pipeline.text_encoder_3).__name__]
    assert encoders == ["CLIPTextModelWithProjection", "T5EncoderModel"]


def test_a_plain_call_draws_one_picture_of_64_pixels(pipeline):
    (image,) = pipeline("a red circle", num_inference_steps=2).images
    assert image.size == (64, 64)


def test_it_draws_right_at_the_presets_short_text_length(pipeline):
    call = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 12}
    drawn = strict_score(pipeline, ["single_object", "two_object", "colors"], 20, **call)
    assert drawn >= 0.3  # noise scores 0, pictures drawn for another prompt at most 0.01


def test_it_draws_right_as_diffusers_calls_it_by_default(pipeline):
    assert strict_score(pipeline, ["colors", "two_object"], 6) >= 0.3


def test_its_card_states_the_scores_and_the_licence():
    card = (FOLDER / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "scripts/pretrain_tiny.py" in card
    for kind in ("single_object", "counting", "position", "ocr"):
        assert f"| {kind} |" in card

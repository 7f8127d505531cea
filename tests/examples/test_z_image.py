"""A fourth backbone in one file outside the package does all that the built-in ones do."""

import sys
from pathlib import Path

import pytest
import torch

from flowrl.api import align
from flowrl.assembly.backbone import backbone_class
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.lora_files import count_layers
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import RolloutRequest, decode, sample_request
from flowrl.sampling.sampler import Schedule
from flowrl.training.tracking import read_metrics
from flowrl.trajectory import Conditioning
from flowrl.trees.plan import ode_plan
from flowrl.utils.distributed import Runtime

NAME, ROOT = "examples.z_image:ZImage", Path(__file__).parents[2]
TEXTS = ["two stars", "a red circle left of a small blue square", ""]  # 1 and 2 times 32 tokens
NEGATIVE = "grey"
LENGTH, STEPS = 80, 3


@pytest.fixture(scope="module", autouse=True)
def at_the_root():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "path", [*sys.path])  # load_callable adds to it
        yield


@pytest.fixture
def request_():
    count = len(TEXTS)
    return RolloutRequest(
        prompts=[PromptRecord(uid=text, text=text) for text in TEXTS],
        prompt=torch.arange(count),
        group=torch.arange(count),
        root=torch.zeros(count).long(),
        seed=3,
        iteration=0,
    )


def made(pipeline, guidance=0.0, **options):
    options = {"max_sequence_length": LENGTH, "height": 64, "width": 64} | options
    return backbone_class(NAME)(pipeline, guidance=guidance, **options)


def ours(backbone, request_):
    schedule = Schedule(sigmas=backbone.sigmas(STEPS), kernel=KERNELS["flow_sde"], noise_level=0.0)
    cond = TextCache(backbone, NEGATIVE, batch_size=2)(request_.prompts)
    plan, count = ode_plan(STEPS), len(TEXTS)
    return sample_request(
        backbone, backbone.velocity, cond, request_, plan, schedule, count
    ).leaves()


def theirs(pipeline, request_, backbone, output):
    height, width = backbone.image_size()
    return pipeline(
        list(TEXTS),
        negative_prompt=[NEGATIVE] * len(TEXTS),
        guidance_scale=backbone.guidance,
        num_inference_steps=STEPS,
        max_sequence_length=LENGTH,
        latents=request_.noise((), 0, "init", backbone.latent_shape()),
        height=height,
        width=width,
        output_type=output,
    ).images


def test_without_noise_latents_and_images_are_diffusers_own(load, request_):
    for guidance in [0.0, 5.0]:
        for size in [{}, {"height": 32, "width": 48}]:
            pipeline = load()
            backbone = made(pipeline, guidance, **size)
            x0 = ours(backbone, request_)
            assert torch.equal(x0, theirs(pipeline, request_, backbone, "latent"))
            own = next(decode(backbone, x0, len(TEXTS)))
            assert torch.equal(own, theirs(pipeline, request_, backbone, "pt"))
            assert own.shape[2:] == backbone.image_size()


def test_what_the_network_is_given_counts(load, request_):
    pipeline = load()
    backbone = made(pipeline)
    cond = TextCache(backbone)(request_.prompts)
    x = request_.noise((), 0, "init", backbone.latent_shape())
    with torch.no_grad():
        v = backbone.velocity(x, torch.tensor(0.5), cond)
        each = backbone.velocity(x, torch.full((3,), 0.5), cond)
        other = backbone.velocity(x, torch.tensor(0.5), cond.take(torch.tensor([1, 2, 0])))
        alone = backbone.velocity(x[:1], torch.tensor(0.5), cond.take(torch.tensor([0])))
        later = backbone.velocity(x, torch.tensor(0.4), cond)
    assert torch.equal(v, each)
    torch.testing.assert_close(alone, v[:1], atol=1e-5, rtol=1e-4)  # whatever the batch's texts
    for changed in (other, later):
        assert (changed - v).abs().max() > 1e-3


@torch.no_grad()
def test_texts_of_any_length_have_one_shape_and_what_pads_them_is_not_read(load, request_):
    backbone = made(load())
    cond = TextCache(backbone)(request_.prompts).tensors
    assert cond["embeds"].shape == (3, LENGTH, 32)
    assert cond["length"].tolist() == [len(text) + 19 for text in TEXTS]  # letters and the chat
    x = request_.noise((), 0, "init", backbone.latent_shape())
    v = backbone.velocity(x, torch.tensor(0.5), Conditioning(tensors=cond))
    for row, length in zip(cond["embeds"], cond["length"], strict=True):
        row[length:] = float("nan")
    assert torch.equal(backbone.velocity(x, torch.tensor(0.5), Conditioning(tensors=cond)), v)


def test_sigmas_are_the_schedulers_and_asking_leaves_it_alone(load):
    for dynamic in [False, True]:
        pipeline = load()
        pipeline.scheduler.register_to_config(use_dynamic_shifting=dynamic)
        before = pipeline.scheduler.sigmas.clone()
        found = made(pipeline).sigmas(STEPS)
        assert torch.equal(pipeline.scheduler.sigmas, before)
        pipeline("", height=64, width=64, num_inference_steps=STEPS, guidance_scale=0)
        assert torch.equal(found, pipeline.scheduler.sigmas)
        assert found[0] == 1 and found[-1] == 0


def test_encoding_images_is_the_inverse_of_the_latents_scale(load):
    backbone = made(load())
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    vae = backbone.pipeline.vae
    mode = vae.encode(images * 2 - 1).latent_dist.mode()
    z = backbone.encode_images(images) / vae.config.scaling_factor + vae.config.shift_factor
    torch.testing.assert_close(z, mode)
    assert z.shape[1:] == backbone.latent_shape()


# --- training ------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_config, folder, tmp_path):
    def make(*, pipeline=None, rollout=None, **others):
        size = {"max_sequence_length": LENGTH, "height": 64, "width": 64}
        few = {"guidance_scale": 2.0, "batch_size": 3, "num_inference_steps": 3}
        return tiny_config(
            pipeline={"path": folder, "backbone": NAME} | size | (pipeline or {}),
            rollout=few | (rollout or {}),
            optim={"micro_batch": 4, "lr": 0.03},
            run={"output_dir": str(tmp_path / "run")},
            **others,
        )

    return make


@pytest.mark.slow
def test_a_run_from_a_folder_learns_and_is_evaluated(config, tmp_path):
    evaluation = {
        "prompts": "tiny:colors:test",
        "num_images": 2,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
    }
    (row,) = align(config(evaluation=evaluation)).comparisons
    assert row.name == "brightness" and row.before != row.after
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)


def test_its_lora_gives_the_policys_images_in_a_pipeline_of_diffusers(
    config, load, request_, tmp_path
):
    pipeline = load()
    align(config(evaluation={"guidance_scale": 0.0}), pipeline=pipeline)
    fresh = load()
    base = theirs(fresh, request_, made(fresh), "pt")
    fresh.load_lora_weights(tmp_path / "run")
    # Attention of two blocks and of both refiners.
    assert count_layers(fresh.transformer) == count_layers(pipeline.transformer) == 4 * (2 + 1 + 1)
    loaded, trained = (theirs(one, request_, made(one), "pt") for one in (fresh, pipeline))
    torch.testing.assert_close(loaded, trained, rtol=0, atol=1e-6)
    assert (loaded - base).abs().max() > 1e-3


LOW = {"precision": "nvfp4-emulated", "min_dim": 0}


def test_layer_rules_are_those_of_its_file(config, tmp_path):
    learner = build_learner(config(pipeline=LOW), Runtime(device="cpu"), ProvidedObjects())
    told = (tmp_path / "run" / "training-precision.json").read_text()
    assert "kept by name: cap_embedder" in told and "kept by name: adaLN" not in told
    assert learner.iterate(0)[1]["grad/norm"] > 0
    # So they are where candidates are drawn cheaply.
    rollout = {
        "tree": {"kind": "ode"},
        "explore": {"candidates": 8, "num_inference_steps": 2, "audit": {"on_miss": "warn"}} | LOW,
    }
    objective = {"kind": "nft", "noising": {"count": 1}}
    learner = build_learner(
        config(rollout=rollout, objective=objective), Runtime(device="cpu"), ProvidedObjects()
    )
    assert learner.iterate(0)[1]["grad/norm"] > 0
    told = (tmp_path / "run" / "precision.json").read_text()
    assert "kept by name: cap_embedder" in told


# --- what cannot work -----------------------------------------------------------------------------


def test_a_backbone_that_is_not_whole_is_told_first(config, monkeypatch):
    # A backbone that is not there is told before anything is loaded.
    for name, message in [
        ("examples.nosuch:ZImage", "No module named 'examples.nosuch'"),
        ("examples.z_image:Nosuch", "has no attribute 'Nosuch'"),
        ("z_image", "expected sd3, flux, sana or module:attribute: 'z_image' is not written as"),
    ]:
        wrong = config(pipeline={"backbone": name, "path": "nosuch"})
        with pytest.raises(UserError, match="pipeline.backbone is") as error:
            build_learner(wrong, Runtime(device="cpu"), ProvidedObjects())
        assert message in str(error.value)
    # Members that a backbone lacks are named.
    monkeypatch.delattr(backbone_class(NAME), "sigmas")
    monkeypatch.delattr(backbone_class(NAME), "lora_targets")
    with pytest.raises(UserError, match="has no lora_targets, sigmas: flowrl/backbones/base.py"):
        build_learner(config(), Runtime(device="cpu"), ProvidedObjects())

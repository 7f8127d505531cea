"""Pretraining can be stopped anywhere, and trains exactly what diffusers will run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flowrl.backbones.flux import Flux, pack
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3
from flowrl.tiny.draw import draw
from flowrl.tiny.world import split_prompts
from scripts.pretrain_tiny import fit as loop
from scripts.pretrain_tiny import flux, pretrain, sana, sd3

ENCODED = {sd3.autoencoder: (16, 8, 8), sana.autoencoder: (32, 4, 4)}  # shape of a latent


def test_pictures_are_a_function_of_the_seed_and_drawn_once(tmp_path, monkeypatch):
    images, captions = pretrain.pictures(tmp_path, 4, 7, 1)
    assert images.shape == (4, 64, 64, 3) and len(captions) == 4
    for i in range(4):
        prompt, rng = pretrain._example(7, i)
        assert prompt["prompt"] == captions[i]
        assert np.array_equal(draw(prompt, rng), images[i])
        assert prompt in split_prompts(prompt["tag"], "train")
    monkeypatch.setattr(pretrain, "get_context", None)  # a second drawing would fail
    assert np.array_equal(pretrain.pictures(tmp_path, 4, 7, 1)[0], images)


@dataclass(frozen=True)
class Family:
    model: type
    vae: Callable
    backbone: type


FAMILIES = {
    "sd3": Family(sd3.TinySD3, sd3.autoencoder, SD3),
    "flux": Family(flux.TinyFlux, sd3.autoencoder, Flux),
    "sana": Family(sana.TinySana, sana.autoencoder, Sana),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    torch.manual_seed(0)
    model = family.model(tmp_path_factory.mktemp("model"))
    for parameter in model.module["transformer"].parameters():
        if not parameter.any():  # or nothing that a prompt changes would reach the velocity
            torch.nn.init.normal_(parameter, std=0.05)
    model.module.eval()
    return model


@pytest.mark.parametrize("length", ["short", "long"])
@torch.no_grad()
def test_pretraining_sees_the_velocity_that_the_pipeline_computes(model, family, length):
    """The same text conditioning, time and network as diffusers' own pipeline."""
    texts = ['the word "CAT"', "a red circle left of a blue square"]
    length = getattr(model, length)
    backbone = family.backbone(
        model.pipeline(model.module, family.vae()),
        guidance=1.0,
        max_sequence_length=length,
        height=64,
        width=64,
    )
    z = torch.randn(2, *ENCODED[family.vae], generator=torch.Generator().manual_seed(0))
    packs = family.backbone is Flux
    sigma = torch.tensor([0.2, 1.0])
    ours = model.velocity(z, sigma, model.tokenize(texts), length)
    theirs = backbone.velocity(pack(z) if packs else z, sigma, backbone.encode(texts, [""] * 2))
    torch.testing.assert_close(pack(ours) if packs else ours, theirs, rtol=1e-4, atol=1e-5)
    other = backbone.velocity(
        pack(z) if packs else z, sigma, backbone.encode(texts[::-1], [""] * 2)
    )
    assert not torch.allclose(other, theirs, atol=1e-3)


@torch.no_grad()
def test_the_empty_prompt_is_the_pipelines_negative_one(model, family):
    """Classifier-free guidance meets in the pipeline what pretraining called no caption."""
    pipeline = model.pipeline(model.module, family.vae())
    if family.backbone is Flux:
        pytest.skip("FLUX.1 has no negative prompt")
    backbone = family.backbone(
        pipeline, guidance=2.0, max_sequence_length=model.short, height=64, width=64
    )
    z = torch.randn(1, *ENCODED[family.vae], generator=torch.Generator().manual_seed(0))
    sigma, ids = torch.tensor([0.5]), model.tokenize(["a red circle", ""])
    cond, none = (
        model.velocity(z, sigma, {k: t[i : i + 1] for k, t in ids.items()}, model.short)
        for i in (0, 1)
    )
    theirs = backbone.velocity(z, sigma, backbone.encode(["a red circle"], [""]))
    torch.testing.assert_close(none + 2 * (cond - none), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cond, none, atol=1e-3)


def test_text_is_mostly_short_sometimes_diffusers_default():
    generator = torch.Generator().manual_seed(0)
    lengths = [pretrain.text_length(generator, 12, 256) for _ in range(2000)]
    assert lengths.count(12) > 1700 and 30 < lengths.count(256) < 100
    assert set(lengths) <= {*range(12, 60), 256}


def test_a_share_of_the_captions_belongs_to_other_pictures():
    rows, generator = torch.arange(4000), torch.Generator().manual_seed(0)
    assert torch.equal(pretrain.mislabel(rows, 0.0, 4000, generator), rows)
    mixed = pretrain.mislabel(rows, 0.25, 4000, generator)
    wrong = mixed[mixed != rows]
    assert 0.22 < len(wrong) / 4000 < 0.28
    assert wrong.min() >= 0 and wrong.max() < 4000 and len(wrong.unique()) > 0.8 * len(wrong)


class Recorder:
    """A TinyModel with one weight that keeps what it was shown; a caption's id is its length."""

    short = long = 12

    def __init__(self):
        self.module = torch.nn.ModuleDict({"transformer_blocks": torch.nn.Linear(1, 1)})
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def tokenize(self, prompts):
        return {"t5": torch.tensor([[len(p)] for p in prompts])}

    def velocity(self, x, sigma, ids, length, guidance=None):
        self.seen.append((x, sigma, ids["t5"][:, 0]))
        return x * self.module["transformer_blocks"].weight.sum()


def shown(folder, monkeypatch, share: float) -> list:
    """What the flow stage of 20 steps shows a model at this share of wrong captions."""
    monkeypatch.setattr(pretrain, "MISLABELLED", share)
    model = Recorder()
    encoded = torch.randn(40, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    captions = ["x" * (i + 1) for i in range(40)]
    ema = copy.deepcopy(model.module)
    pretrain.fit_flow(model, ema, encoded, captions, steps=20, seed=0, folder=folder)
    return model.seen


def test_some_captions_are_wrong_once_the_learning_rate_falls_and_nothing_else(
    tmp_path, monkeypatch
):
    right = shown(tmp_path / "right", monkeypatch, 0.0)
    mixed = shown(tmp_path / "mixed", monkeypatch, 0.5)
    changed = []
    for step, (a, b) in enumerate(zip(right, mixed, strict=True)):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])  # pictures, noise, sigma
        assert torch.equal(a[2] == 0, b[2] == 0)  # which captions are dropped
        if not torch.equal(a[2], b[2]):
            changed.append(step)
    assert changed == [18, 19]  # the last 15 % of 20 steps are 17 to 19, at 17 the rate is whole


class Guided(Recorder):
    """A teacher whose velocity is the caption's length, -1 for ""."""

    def velocity(self, x, sigma, ids, length, guidance=None):
        lengths = ids["t5"][:, 0].float()
        return torch.where(lengths == 0, -1.0, lengths)[:, None, None, None].expand(x.shape)


def test_a_teacher_is_followed_at_the_guidance_that_the_model_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "DROPOUT", 0.0)
    monkeypatch.setattr(pretrain, "MISLABELLED", 0.0)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        pretrain.F, "mse_loss", lambda v, target: seen.append((v, target)) or v.sum()
    )

    class Student(Recorder):
        def velocity(self, x, sigma, ids, length, guidance=None):
            self.told = guidance
            v = ids["t5"][:, 0].float()[:, None, None, None].expand(x.shape)
            return v * self.module["transformer_blocks"].weight.sum().detach().clamp(1, 1)

    student, guidances = Student(), []
    original = pretrain.guided_velocity

    def spy(*arguments):
        guidances.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(pretrain, "guided_velocity", spy)
    monkeypatch.setattr(pretrain, "fit", lambda name, module, optimizers, loss_at, **_: loss_at(0))
    encoded = torch.randn(40, 2, 4, 4)
    captions = ["x" * (i + 1) for i in range(40)]
    pretrain.fit_flow(
        student, copy.deepcopy(student.module), encoded, captions,
        steps=4, seed=0, folder=tmp_path, teacher=Guided(),
    )  # fmt: skip
    (drawn, target), (scale,) = seen[0], guidances
    assert torch.equal(student.told, scale) and 1 <= scale.min() and scale.max() <= 7
    assert scale.max() - scale.min() > 3
    length = drawn[:, 0, 0, 0]
    torch.testing.assert_close(target[:, 0, 0, 0], -1 + scale * (length + 1))


def test_learning_lowers_the_loss(model, family, tmp_path, monkeypatch):
    losses: list[float] = []
    monkeypatch.setattr(
        loop.RunningLoss, "hear", lambda self, step, loss: losses.append(loss.item())
    )
    monkeypatch.setattr(loop, "WARM_UP", 2)
    prompts = [split_prompts(tag, "train")[0] for tag in ("colors", "counting")]
    captions = [p["prompt"] for p in prompts] * 4
    encoded = 0.1 * torch.randn(8, *ENCODED[family.vae], generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pretrain, "text_length", lambda *_: 12)
    pretrain.fit_flow(
        model,
        copy.deepcopy(model.module),
        encoded,
        captions,
        steps=12,
        seed=0,
        folder=tmp_path,
        batch=8,
    )
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

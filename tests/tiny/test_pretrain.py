"""Pretraining can be stopped anywhere, and trains exactly what diffusers will run."""

import copy

import numpy as np
import pytest
import torch

from flowrl.backbones.sd3 import SD3
from flowrl.tiny import fit as loop
from flowrl.tiny import pretrain
from flowrl.tiny.draw import draw
from flowrl.tiny.sd3 import LONG, SHORT, TinySD3, autoencoder
from flowrl.tiny.world import split_prompts

STEPS = 6


class Stopped(Exception):
    pass


def fit(folder, *, stop_at: int | None = None) -> tuple[dict, dict]:
    """A small regression -> weights and their average."""
    torch.manual_seed(0)
    module, ema = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    ema.load_state_dict(module.state_dict())

    def loss_at(step: int) -> torch.Tensor:
        if step == stop_at:
            raise Stopped
        x = torch.randn(8, 4, generator=pretrain.generator_at(0, step))
        return (module(x) - x.flip(1)).square().mean()

    optimizers = [
        torch.optim.AdamW([module.weight], lr=0.1),
        torch.optim.AdamW([module.bias], lr=0.2),
    ]
    pretrain.fit("toy", module, optimizers, loss_at, steps=STEPS, decay=0.3, folder=folder, ema=ema)
    return module.state_dict(), ema.state_dict()


@pytest.mark.parametrize("stop_at", [1, 4])
def test_stopped_and_resumed_the_weights_are_bit_identical(tmp_path, monkeypatch, stop_at):
    whole = fit(tmp_path / "whole")
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1)  # after every step
    with pytest.raises(Stopped):
        fit(tmp_path / "parts", stop_at=stop_at)
    parts = fit(tmp_path / "parts")
    for a, b in zip(whole, parts, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(whole[0]["weight"], whole[1]["weight"])


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    factors = [loop.trapezoid(step, 1000, 0.3) for step in range(1001)]
    assert factors[0] == 1 / loop.WARM_UP and factors[-1] == 0
    assert set(factors[loop.WARM_UP : 700]) == {1.0}
    assert factors[850] == pytest.approx(0.5)
    # Before the decay the length of the training does not matter: it may still be changed.
    assert factors[:700] == [loop.trapezoid(step, 5000, 0.3) for step in range(700)]


def test_a_finished_stage_is_loaded_and_not_trained_again(tmp_path):
    first = fit(tmp_path)
    again = fit(tmp_path, stop_at=0)
    assert all(torch.equal(first[0][k], again[0][k]) for k in first[0])


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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    model = TinySD3(tmp_path_factory.mktemp("model"))
    model.module.eval()
    return model


@pytest.mark.parametrize("length", [SHORT, LONG])
@torch.no_grad()
def test_pretraining_sees_the_velocity_that_the_pipeline_computes(model, length):
    """The same text conditioning, time and network as `StableDiffusion3Pipeline`."""
    texts = ["", 'the word "CAT"', "a red circle left of a blue square"]
    backbone = SD3(model.pipeline(model.module, autoencoder()), max_sequence_length=length)
    x = torch.randn(3, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.2, 0.5, 1.0])
    ours = model.velocity(x, sigma, model.tokenize(texts), length)
    theirs = backbone.velocity(x, sigma, backbone.encode(texts, [""] * 3))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours[1], ours[2], atol=1e-3)


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


def test_captions_are_right_until_the_learning_rate_falls(model, tmp_path, monkeypatch):
    shares: list[float] = []

    def mislabel(rows, share, count, generator):
        shares.append(share)
        return rows

    monkeypatch.setattr(pretrain, "mislabel", mislabel)
    monkeypatch.setattr(pretrain, "text_length", lambda *_: 12)
    pretrain.fit_flow(
        model,
        copy.deepcopy(model.module),
        torch.zeros(2, 16, 8, 8),
        ["a red circle", "a blue square"],
        steps=20,
        seed=0,
        folder=tmp_path,
        batch=2,
    )
    first = round((1 - pretrain.FLOW_DECAY) * 20)
    assert shares == [0.0] * first + [pretrain.MISLABELLED] * (20 - first)


def test_latents_are_normalised_as_the_pipeline_will_undo_it(tmp_path):
    torch.manual_seed(0)
    vae = autoencoder().eval()
    images = np.random.default_rng(0).integers(0, 256, (64, 64, 64, 3), dtype=np.uint8)
    pretrain.normalise_latents(vae, images)
    latents = pretrain.encode_all(vae, images, tmp_path / "latents")
    assert latents.mean().abs() < 0.01 and (latents.std() - 1).abs() < 0.01
    with torch.no_grad():
        raw = vae.encode(pretrain.to_tensor(images[:4])).latent_dist.mean
    undone = latents[:4] / vae.config.scaling_factor + vae.config.shift_factor
    torch.testing.assert_close(undone, raw, rtol=0, atol=2e-3 / vae.config.scaling_factor)


def test_learning_lowers_both_losses(model, tmp_path, monkeypatch):
    losses: list[float] = []
    monkeypatch.setattr(
        loop.RunningLoss, "hear", lambda self, step, loss: losses.append(loss.item())
    )
    monkeypatch.setattr(loop, "WARM_UP", 2)
    prompts = [split_prompts(tag, "train")[0] for tag in ("colors", "counting")]
    images, captions = pretrain._draw_range(0, 0, 8)[0], [p["prompt"] for p in prompts] * 4
    vae = autoencoder()
    pretrain.fit_autoencoder(vae, images, steps=12, seed=0, folder=tmp_path, batch=4)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    losses.clear()
    latents = torch.randn(8, 16, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.1
    monkeypatch.setattr(pretrain, "text_length", lambda *_: 12)
    pretrain.fit_flow(
        model,
        copy.deepcopy(model.module),
        latents,
        captions,
        steps=12,
        seed=0,
        folder=tmp_path,
        batch=8,
    )
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

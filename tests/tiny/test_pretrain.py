"""Pretraining can be stopped anywhere, and trains exactly what diffusers will run."""

import contextlib
import copy

import numpy as np
import pytest
import torch

from flowrl.backbones.sd3 import SD3
from flowrl.errors import UserError
from flowrl.tiny import fit as loop
from flowrl.tiny import pretrain
from flowrl.tiny.draw import draw
from flowrl.tiny.sd3 import LONG, SHORT, TinySD3, autoencoder
from flowrl.tiny.world import split_prompts

STEPS = 6


class Stopped(Exception):
    pass


def fit(folder, *, stop_at: int | None = None, steps: int = STEPS) -> tuple[dict, dict]:
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
    pretrain.fit("toy", module, optimizers, loss_at, steps=steps, decay=0.3, folder=folder, ema=ema)
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


def test_before_the_decay_the_number_of_steps_may_change(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole", steps=12)
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1)
    with pytest.raises(Stopped):
        fit(tmp_path / "parts", stop_at=4)
    parts = fit(tmp_path / "parts", steps=12)
    for a, b in zip(whole, parts, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(("first", "saved", "steps"), [(6, 6, 12), (14, 10, 11), (14, 10, 9)])
def test_once_it_began_the_number_of_steps_is_fixed(tmp_path, monkeypatch, first, saved, steps):
    """Step 6 lies in the decay of 6, step 10 in the decay of 11 and after the end of 9."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1)
    with contextlib.suppress(Stopped):  # one that is saved at its end is not stopped
        fit(tmp_path, stop_at=saved, steps=first)
    with pytest.raises(UserError, match=f"step {saved} of {first}: too late to train {steps}"):
        fit(tmp_path, steps=steps)


@pytest.mark.parametrize(("steps", "decay"), [(1000, 0.3), (16_500, 0.15), (20, 0.15), (7, 0.3)])
def test_the_decay_starts_where_the_rate_leaves_its_peak(monkeypatch, steps, decay):
    monkeypatch.setattr(loop, "WARM_UP", 1)
    start = loop.decay_start(steps, decay)
    assert loop.trapezoid(start - 1, steps, decay) == pytest.approx(1, abs=1e-9)
    assert loop.trapezoid(start, steps, decay) < 1 - 1e-9


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


class Recorder:
    """A TinyModel with one weight that keeps what it was shown; a caption's id is its length."""

    short = long = 12

    def __init__(self):
        self.module = torch.nn.ModuleDict({"transformer_blocks": torch.nn.Linear(1, 1)})
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def tokenize(self, prompts):
        return {"t5": torch.tensor([[len(p)] for p in prompts])}

    def velocity(self, x, sigma, ids, length):
        self.seen.append((x, sigma, ids["t5"][:, 0]))
        return x * self.module["transformer_blocks"].weight.sum()


def shown(folder, monkeypatch, share: float) -> list:
    """What the flow stage of 20 steps shows a model at this share of wrong captions."""
    monkeypatch.setattr(pretrain, "MISLABELLED", share)
    model = Recorder()
    latents = torch.randn(40, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    captions = ["x" * (i + 1) for i in range(40)]
    ema = copy.deepcopy(model.module)
    pretrain.fit_flow(model, ema, latents, captions, steps=20, seed=0, folder=folder)
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


def test_latents_of_other_pictures_are_refused(tmp_path):
    path = tmp_path / "latents.safetensors"
    images = np.zeros((64, 64, 64, 3), np.uint8)
    vae = autoencoder()
    pretrain.normalise_latents(vae, images)
    assert len(pretrain.encode_all(vae, images, path)) == 64
    with pytest.raises(UserError, match="holds 64 pictures, not 65: delete it"):
        pretrain.encode_all(vae, np.concatenate([images, images[:1]]), path)


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

"""The loop of the pretraining: stopped anywhere, it goes on as if nothing had happened."""

import contextlib

import pytest
import torch

from flowrl.errors import UserError
from scripts.pretrain_tiny import fit as loop
from scripts.pretrain_tiny import latents, pretrain

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
        x = torch.randn(8, 4, generator=latents.generator_at(0, step))
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

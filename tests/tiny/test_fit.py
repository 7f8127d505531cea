"""The loop of the pretraining: stopped anywhere, it goes on as if nothing had happened."""

import pytest
import torch

from scripts.pretrain_tiny import fit as loop

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
        x = torch.randn(8, 4, generator=loop.generator_at(0, step))
        return (module(x) - x.flip(1)).square().mean()

    optimizers = [
        torch.optim.AdamW([module.weight], lr=0.1),
        torch.optim.AdamW([module.bias], lr=0.2),
    ]
    loop.fit("toy", module, optimizers, loss_at, steps=steps, decay=0.3, folder=folder, ema=ema)
    return module.state_dict(), ema.state_dict()


def same(one: tuple[dict, dict], other: tuple[dict, dict]) -> bool:
    return all(torch.equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


def test_stopped_and_resumed_the_weights_are_bit_identical(tmp_path, monkeypatch):
    """Also where the number of steps is another than before, as long as the decay has not begun."""
    wholes = {steps: fit(tmp_path / f"whole {steps}", steps=steps) for steps in (STEPS, 12)}
    assert not torch.equal(wholes[STEPS][0]["weight"], wholes[STEPS][1]["weight"])
    assert same(wholes[STEPS], fit(tmp_path / f"whole {STEPS}", stop_at=0))  # loaded, not trained
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1)  # after every step
    for stop_at, steps in ((1, STEPS), (4, STEPS), (4, 12)):
        folder = tmp_path / f"stopped at {stop_at} of {steps}"
        with pytest.raises(Stopped):
            fit(folder, stop_at=stop_at)
        assert same(fit(folder, steps=steps), wholes[steps])

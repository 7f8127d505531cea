"""How much of each denoising step's gradient repeats from rollout to rollout."""

import math

import pytest
import torch
from torch import nn

from flowrl.errors import UserError
from scripts.gradient_signal import measure, step_signals


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_shares_and_what_repeats_are_those_of_the_gradients_that_were_made():
    size, noise = 4000, torch.tensor([1.0, 2.0])[:, None]
    fixed = nn.functional.normalize(randn(2, size, seed=99), dim=1) * torch.tensor([[1.0], [0.0]])
    made = [fixed + randn(2, size, seed=m) / math.sqrt(size) * noise for m in range(6)]
    first, second, whole = step_signals(torch.stack(made))
    assert first.rms == pytest.approx(math.sqrt(2), rel=0.03)
    assert (first.share, second.share) == pytest.approx((2 / 6, 4 / 6), abs=0.02)
    assert first.repeats == pytest.approx(1 / 2, abs=0.03)
    assert second.repeats == pytest.approx(0, abs=0.03)
    assert whole.repeats == pytest.approx(1 / 6, abs=0.03)
    with pytest.raises(ValueError, match="two rollouts"):
        step_signals(torch.stack(made[:1]))


def test_the_steps_of_a_recipe_share_its_gradient_and_images_have_none(tiny_config, load_tiny):
    config = tiny_config(rollout={"num_inference_steps": 3})
    rows = measure(config, 2, load_tiny())
    assert [row["step"] for row in rows] == [0, 1, "all"]
    assert sum(row["share of power"] for row in rows[:-1]) == pytest.approx(1)
    assert all(row["rms norm"] > 0 for row in rows)
    nft = tiny_config(objective={"kind": "nft"}, rollout={"tree": {"kind": "ode"}})
    with pytest.raises(UserError, match=r"objective\.kind"):
        measure(nft, 2, load_tiny())

"""How much of each denoising step's gradient repeats from rollout to rollout."""

import math

import pytest
import torch
from torch import nn

from flowrl.api import signal as measure
from flowrl.config.trees import BranchGRPOOptions, FlowGRPOOptions, TreeGRPOOptions
from flowrl.errors import UserError
from flowrl.training.signal import SignalMeter, advice, step_gradients
from flowrl.trajectory import Conditioning, Transitions

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def edges() -> Transitions:
    """Nine edges of six parents at three steps, two edges of some parents."""
    parent = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 5])
    step = torch.tensor([0, 0, 1, 2, 2, 0, 1, 2, 2])
    each = torch.ones(9, dtype=F64)
    return Transitions(
        x=randn(6, 4),
        sigma=torch.linspace(1, 0.2, 6, dtype=F64),
        prompt=torch.zeros(6).long(),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        parent=parent,
        x_next=randn(9, 4, seed=1),
        mean_old=randn(9, 4, seed=2),
        sigma_next=each / 9,
        g=each,
        advantage=randn(9, seed=3),
        weight=each,
        step=step,
        cond=Conditioning(tensors={}),
        no_advantage=0.0,
    )


def test_the_parts_of_all_steps_are_the_whole_gradient():
    network, batch = nn.Linear(4, 4, dtype=F64), edges()
    parameters = list(network.parameters())

    def backward(part: Transitions) -> None:
        error = (network(part.x)[part.parent] - part.x_next).square().mean(1)
        ((error * part.advantage).sum() / len(batch)).backward()

    found = step_gradients(batch, (0, 1, 2), backward, parameters)
    assert all(p.grad is None for p in parameters)
    backward(batch)
    whole = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(found.sum(0), whole, rtol=1e-12, atol=1e-14)
    assert bool((found.norm(dim=1) > 0).all())
    assert bool((step_gradients(batch, (7,), backward, parameters) == 0).all())  # not there


def meter(noise: list[float], repeated: list[float], rollouts: int = 6, size: int = 4000):
    """Of steps whose gradients are a fixed direction and noise of these norms."""
    found = SignalMeter(range(len(noise)), [1 - 0.2 * i for i in range(len(noise))])
    fixed = nn.functional.normalize(randn(len(noise), size, seed=99), dim=1)
    scale = torch.tensor(noise, dtype=F64)[:, None]
    for m in range(rollouts):
        drawn = randn(len(noise), size, seed=m) / math.sqrt(size)
        found.add(fixed * torch.tensor(repeated, dtype=F64)[:, None] + drawn * scale)
    return found


def test_shares_and_what_repeats_are_those_of_the_gradients_that_were_made():
    signal = meter([1.0, 2.0], [1.0, 0.0]).signal()
    first, second = signal.steps
    assert first.rms == pytest.approx(math.sqrt(2), rel=0.03)
    assert (first.share, second.share) == pytest.approx((2 / 6, 4 / 6), abs=0.02)
    assert first.repeats == pytest.approx(1 / 2, abs=0.03) == second.rest
    assert second.repeats == pytest.approx(0, abs=0.03)
    assert signal.repeats == pytest.approx(1 / 6, abs=0.03)
    # The mean of four such rollouts has a quarter of the noise.
    four = meter([1.0, 2.0], [1.0, 0.0]).signal(parts=4)
    assert four.steps[0].repeats == pytest.approx(1 / (1 + 1 / 4), abs=0.03)
    with pytest.raises(ValueError, match="two rollouts"):
        meter([1.0], [1.0], rollouts=1).signal()


def test_a_step_of_noise_alone_is_named_with_what_leaves_it_out():
    signal = meter([1.0, 1.0, 1.0, 6.0], [0.5, 0.5, 0.5, 0.0]).signal()
    assert signal.drowning == (3,) and signal.kept > 3 * signal.repeats
    splits = BranchGRPOOptions(splits=[0, 1, 2, 3])
    text = advice(signal, splits, 5)
    assert text.startswith("Step 3 (sigma 0.40) holds 9") and "does not repeat" in text
    assert "rollout.tree.splits to [0, 1, 2];" in text and "step_weight: noise" in text
    assert "rollout.tree.window to {kind: fixed, start: 0, size: 3}" in advice(
        signal, TreeGRPOOptions(), 5
    )
    assert "flow_grpo_fast, window: {kind: fixed, start: 0, size: 3}" in advice(
        signal, FlowGRPOOptions(), 5
    )


def test_a_drowning_step_is_named_where_few_rollouts_see_no_signal_elsewhere_either():
    signal = meter([1.0, 1.0, 6.0], [0.0, 0.0, 0.0], rollouts=4).signal()
    assert signal.drowning == (2,)
    assert advice(signal, FlowGRPOOptions(), 5).startswith("Step 2 (sigma 0.60) holds 9")


def test_a_large_step_that_repeats_is_left_alone():
    signal = meter([1.0, 1.0, 6.0], [0.5, 0.5, 6.0]).signal()
    assert signal.steps[2].share > 0.9 and signal.drowning == ()
    assert advice(signal, FlowGRPOOptions(), 5).startswith("No step holds")


def test_a_recipes_signal_is_the_same_again_and_moves_nothing(tiny_config, load_tiny):
    config = tiny_config(rollout={"num_inference_steps": 3})

    def found() -> tuple[list[dict], str]:
        return measure(config, rollouts=2, pipeline=load_tiny())

    rows, sentence = found()
    assert (rows, sentence) == found()
    assert [row["step"] for row in rows] == [0, 1, "all"]
    assert sum(row["share of power"] for row in rows[:-1]) == pytest.approx(1)
    nft = tiny_config(objective={"kind": "nft"}, rollout={"tree": {"kind": "ode"}})
    with pytest.raises(UserError, match="denoising steps"):
        measure(nft, rollouts=2, pipeline=load_tiny())


def test_a_run_logs_its_signal_when_due_and_learns_the_same(make_learner):
    options = {"rollout": {"num_inference_steps": 3}}
    plain = make_learner(**options)
    metrics = [plain.iterate(i)[1] for i in range(2)]
    watched = make_learner(**options, run={"signal_every": 2})
    seen = [watched.iterate(i)[1] for i in range(2)]
    assert "signal/repeats" in seen[0] and "signal/share/step_1" in seen[0]
    assert not any(name.startswith("signal/") for name in (*seen[1], *metrics[0]))
    for before, after in zip(plain.policy.parameters(), watched.policy.parameters(), strict=True):
        assert torch.equal(before, after)

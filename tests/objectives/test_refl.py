"""ReFL and DRaFT-LV against plain autograd, and in a world where their means are known."""

import pytest
import torch
from toy_chains import T, Toy, assert_same, chains, gradient, loss_of, only, velocity, worth

from flowrl.objectives.batches import Trajectories
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import RewardBackprop, fresh_noise
from flowrl.objectives.reward_backprop.draft import DRaFT, fixed
from flowrl.objectives.reward_backprop.refl import DRaFTLV, ReFL
from flowrl.trajectory import Conditioning


@pytest.mark.parametrize("window", [0.2, 0.6, 1.0])
def test_refl_is_the_gradient_of_the_reward_of_one_prediction(window):
    toy, objective = Toy(), ReFL(ascent=RewardBackprop(), window=window)
    batch = chains(toy)
    parts, values = [], []
    for n, i in enumerate(objective.step(batch).tolist()):
        assert T - round(window * T) <= i < T
        own = only(batch, n)
        x0 = own.x[:, i] - own.sigmas[i] * velocity(toy, own, own.x[:, i], i)
        loss = -worth(x0, own.prompt).mean()
        parts.append(gradient(loss, toy))
        values.append(loss.detach())
    loss, metrics = loss_of(objective, toy, batch)
    assert_same(gradient(loss, toy), torch.stack(parts).mean(0))
    assert_same(loss.detach(), torch.stack(values).mean())
    assert_same(metrics["path/reward"], -loss.detach())


def test_refl_draws_every_late_step():
    objective = ReFL(ascent=RewardBackprop(), window=0.6)
    steps = objective.step(chains(Toy(), count=400))
    counts = steps.bincount(minlength=T).double() / 400
    torch.testing.assert_close(
        counts, torch.tensor([0, 0, 1, 1, 1]).double() / 3, rtol=0, atol=0.08
    )


def test_draft_lv_is_the_mean_gradient_over_its_copies():
    toy, objective = Toy(), DRaFTLV(ascent=RewardBackprop(), copies=3)
    batch = chains(toy)
    noise = fresh_noise(batch, "copy", 3).view(len(batch), 3, -1)
    t = batch.sigmas[T - 1].expand(len(batch))
    losses = []
    for copy in noise.unbind(1):
        x = noised(batch.x[:, -1], copy, t)
        losses.append(-worth(x - t[:, None] * velocity(toy, batch, x, T - 1), batch.prompt))
    assert_same(
        gradient(loss_of(objective, toy, batch)[0], toy),
        gradient(torch.cat(losses).mean(), toy),
    )


def test_at_the_last_step_refl_is_draft_1():
    toy = Toy()
    batch = chains(toy)
    refl = loss_of(ReFL(ascent=RewardBackprop(), window=0.01), toy, batch)[0]
    draft = loss_of(DRaFT(ascent=RewardBackprop(), depth=fixed(1)), toy, batch)[0]
    assert_same(gradient(refl, toy), gradient(draft, toy))


class Line(torch.nn.Module):
    """The exact velocity of data N(0, 4), plus theta x with theta = 0."""

    std = 2.0

    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.zeros(()).double())

    def forward(self, x, sigma, cond):
        sigma = sigma[:, None]
        var = (1 - sigma) ** 2 * self.std**2 + sigma**2
        return ((sigma - (1 - sigma) * self.std**2) / var + self.theta) * x


@torch.no_grad()
def last_step(toy, exact: bool, count=3000, width=8) -> Trajectories:
    """Chains of one step from the marginal at 0.6: along the flow, or by Euler."""
    sigmas = torch.tensor([0.6, 0.0]).double()
    var = (0.4 * toy.std) ** 2 + 0.6**2
    normal = torch.randn(count, width, generator=torch.Generator().manual_seed(0)).double()
    x = normal * var**0.5
    x0 = normal * toy.std if exact else x - 0.6 * toy(x, sigmas[0].expand(count), None)
    zeros = torch.zeros(count, dtype=torch.long)
    return Trajectories(
        x=torch.stack([x, x0], 1), sigmas=sigmas, prompt=zeros, group=zeros,
        image=torch.arange(count), forwards=zeros + 1, left_out={}, seed=0,
        cond=Conditioning(tensors={"c": torch.zeros(1, 1)}),
    )  # fmt: skip


@pytest.mark.parametrize("exact", [True, False])
def test_other_noises_have_the_last_steps_mean_gradient_where_the_chain_is_the_flow(exact):
    """And not behind a coarse step, whose pictures have another spread than the flow's."""
    toy = Line()
    batch = last_step(toy, exact)

    def bowl(x0, prompt, words=""):
        return -x0.square().sum(1), -2 * x0

    def found(objective):
        return gradient(loss_of(objective, toy, batch, reward=bowl)[0], toy).item()

    last = found(ReFL(ascent=RewardBackprop(), window=1.0))
    copies = found(DRaFTLV(ascent=RewardBackprop(), copies=2))
    # Closed form: the mean of -dr/dtheta = -2 t x (1 - t k) x over x of the marginal's variance.
    t, var = 0.6, (0.4 * toy.std) ** 2 + 0.36
    rest = 1 - t * (t - 0.4 * toy.std**2) / var
    assert last == pytest.approx(-2 * t * rest * var * 8, rel=0.03)
    if exact:
        assert copies == pytest.approx(last, rel=0.03)
    else:
        after = (0.4 * rest) ** 2 * var + 0.36
        assert copies == pytest.approx(-2 * t * rest * after * 8, rel=0.03)
        assert abs(copies / last - 1) > 0.2

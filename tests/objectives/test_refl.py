import torch
from toy_chains import T, Toy, assert_same, chains, gradient, loss_of, only, reward_of, velocity

from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import fresh_noise
from flowrl.objectives.reward_backprop.refl import DRaFTLV, ReFL


def test_refl_is_the_gradient_of_the_reward_of_one_prediction():
    for window in [0.2, 0.6, 1.0]:
        toy, objective = Toy(), ReFL(window=window)
        batch = chains(toy)
        parts, values = [], []
        for n, i in enumerate(objective.step(batch).tolist()):
            assert T - round(window * T) <= i < T
            own = only(batch, n)
            x0 = own.x[:, i] - own.sigmas[i] * velocity(toy, own, own.x[:, i], i)
            loss = -reward_of(x0, own.prompt).mean()
            parts.append(gradient(loss, toy))
            values.append(loss.detach())
        loss, metrics = loss_of(objective, toy, batch)
        assert_same(gradient(loss, toy), torch.stack(parts).mean(0))
        assert_same(loss.detach(), torch.stack(values).mean())
        assert_same(metrics["path/reward"], -loss.detach())


def test_refl_draws_every_late_step():
    objective = ReFL(window=0.6)
    steps = objective.step(chains(Toy(), count=400))
    counts = steps.bincount(minlength=T).double() / 400
    torch.testing.assert_close(
        counts, torch.tensor([0, 0, 1, 1, 1]).double() / 3, rtol=0, atol=0.08
    )


def test_draft_lv_is_the_mean_gradient_over_its_copies():
    toy, objective = Toy(), DRaFTLV(copies=3)
    batch = chains(toy)
    noise = fresh_noise(batch, "copy", 3).view(len(batch), 3, -1)
    t = batch.sigmas[T - 1].expand(len(batch))
    losses = []
    for copy in noise.unbind(1):
        x = noised(batch.x[:, -1], copy, t)
        losses.append(-reward_of(x - t[:, None] * velocity(toy, batch, x, T - 1), batch.prompt))
    assert_same(
        gradient(loss_of(objective, toy, batch)[0], toy), gradient(torch.cat(losses).mean(), toy)
    )

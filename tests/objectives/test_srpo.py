import pytest
import torch
from toy_chains import Toy, assert_same, chains, field, gradient, loss_of, reward_of

from flowrl.errors import UserError
from flowrl.objectives.reward_backprop.base import fresh_noise
from flowrl.objectives.reward_backprop.srpo import SRPO

WORDS = {"positive_words": "good", "negative_words": "rather bad"}


def written_out(toy, batch, objective):
    row, sigma, to = objective.points(batch)
    noise = fresh_noise(batch, "noise") if objective.noise == "fresh" else batch.x[:, 0]
    noise, t, s = noise[row], sigma[:, None], to[:, None]
    x = (1 - t) * batch.x[row, -1] + t * noise
    v = toy(x, sigma, batch.cond.take(batch.prompt[row]))
    x0 = (x + (s - t) * v - s * noise) / (1 - s)
    losses, hinge = [], objective.hinge
    for n in range(len(row)):
        one, prompt = x0[[n]], batch.prompt[row[n]][None]
        down = bool(to[n] < sigma[n])
        if objective.positive_words:
            low, high = objective.denoise_k if down else objective.inversion_k
            k = low + (high - low) * (1 - to[n])
            words = (objective.positive_words, objective.negative_words)
            better, worse = words if down else words[::-1]
            score = (1 + k) * reward_of(one, prompt, better) - reward_of(one, prompt, worse)
        else:
            # The value is the image's own; at the step up it moves the other way.
            score = reward_of(one if down else 2 * one.detach() - one, prompt)
        losses.append(-score if hinge is None else (hinge - score).relu())
    return torch.cat(losses).mean()


def test_both_branches_are_autograd_through_one_step():
    for words in [{}, WORDS]:
        for options in [{}, {"noise": "fresh"}, {"inversion": False}, {"hinge": 0.2}]:
            toy, objective = Toy(), SRPO(**words, **options)
            batch = chains(toy)
            loss, _ = loss_of(objective, toy, batch)
            expected = written_out(toy, batch, objective)
            assert_same(loss.detach(), expected.detach())
            assert_same(gradient(loss, toy), gradient(expected, toy))


def test_a_satisfied_image_has_no_gradient_in_either_half():
    for inversion in [True, False]:
        toy, batch = Toy(), chains(Toy())

        def high(x0, prompt, words=""):
            r, slope = field(x0, prompt)
            return r + 10, slope

        for hinge, satisfied in ((5.0, 1.0), (15.0, 0.0)):
            objective = SRPO(hinge=hinge, inversion=inversion)
            loss, metrics = loss_of(objective, toy, batch, reward=high)
            assert metrics["path/satisfied"] == satisfied
            assert bool((gradient(loss, toy) == 0).all()) == (satisfied == 1)
            mean = metrics["path/reward"]
            assert_same(loss.detach(), 0 * mean if satisfied else hinge - mean)


def test_without_words_the_reward_that_is_reported_is_its_mean():
    asked = []

    def seen(x0, prompt, words=""):
        asked.append(field(x0, prompt))
        return asked[-1]

    loss, metrics = loss_of(SRPO(), Toy(), chains(Toy()), reward=seen)
    assert_same(metrics["path/reward"], asked[0][0].mean())
    assert_same(loss.detach(), -asked[0][0].mean())


def test_the_steps_lie_in_their_range_and_mirror_each_other():
    batch = chains(Toy(), count=200)
    row, sigma, to = SRPO(gap=0.1, lowest=0.3, highest=0.9).points(batch)
    down = to < sigma
    assert down.sum() == 200 and row.tolist() == [*range(200)] * 2
    torch.testing.assert_close((sigma - to).abs(), torch.full((400,), 0.1).double())
    assert sigma[down].min() >= 0.3 and sigma[down].max() <= 0.9
    assert sigma[down].mean().item() == pytest.approx(0.6, abs=0.05)
    torch.testing.assert_close(sigma[down], to[~down])
    # The network is never asked about a latent without noise.
    assert SRPO(gap=0.1, lowest=0.1, highest=0.1).points(batch)[1].min() == 0.01


def test_a_reward_that_does_not_read_the_words_is_refused():
    def deaf(x0, prompt, words=""):
        return field(x0, prompt)

    batch = chains(Toy())
    with pytest.raises(UserError, match="words"):
        loss_of(SRPO(**WORDS), Toy(), batch, reward=deaf)
    loss_of(SRPO(), Toy(), batch, reward=deaf)


def test_what_cannot_work_is_refused():
    for options in [{"gap": 0.2, "lowest": 0.1}, {"highest": 1.0}, {"positive_words": "good"}]:
        with pytest.raises(UserError, match="must be in order|both positive and negative"):
            SRPO(**options)

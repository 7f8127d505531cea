import math
from types import SimpleNamespace

import pytest
import torch

from flowrl.errors import UserError
from flowrl.objectives.reward_backprop.decoder import (
    RewardGradient,
    check_differentiable,
    differentiate,
    trained,
)
from flowrl.scoring.combine import combine
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec


class Red:
    name = "red"
    differentiable = True

    def __init__(self):
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def __call__(self, images, prompts, metadata):
        return (self.scale * images[:, 0]).flatten(1).mean(1)


class Contrast:
    name = "contrast"
    differentiable = True

    def applies(self, prompt, metadata):
        return "sharp" in prompt

    def __call__(self, images, prompts, metadata):
        assert all("sharp" in prompt for prompt in prompts)
        lost = torch.tensor(["broken" in prompt for prompt in prompts])
        return images.flatten(1).std(1).masked_fill(lost, math.nan)


class Length:
    name = "length"
    differentiable = True

    def __call__(self, images, prompts, metadata):
        return images.flatten(1).mean(1) * torch.tensor([float(len(p)) for p in prompts])


class Decoder(torch.nn.Module):
    """(B, 2, 3, 3) -> (B, 3, 3, 3)."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(2, 3, 1)

    def decode(self, x0):
        return self.layer(x0).sigmoid()


torch.manual_seed(0)
DECODER = Decoder()
PROMPTS = ("plain", "a sharp one", "sharp but broken")
ROLLOUT = SimpleNamespace(prompts=PROMPTS, metadata=({}, {}, {}))
SPECS = [
    RewardSpec(name="red", reward=Red(), weight=1.5),
    RewardSpec(name="contrast", reward=Contrast(), weight=-0.5),
    RewardSpec(name="length", reward=Length(), held_out=True),
]
X0 = torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(1))
NUMBER = torch.tensor([0, 1, 0, 1, 0])


def field(specs=SPECS, batch_size=16):
    return RewardGradient(DECODER, specs, batch_size)(ROLLOUT)  # type: ignore[arg-type]


def test_reward_and_gradient_are_those_of_the_weighted_sum_by_autograd():
    x = X0.clone().requires_grad_()
    images = DECODER.decode(x)
    red = 2 * images[:, 0].flatten(1).mean(1)
    # Where contrast does not apply, the other weight grows to the same total.
    both = 1.5 * red - 0.5 * images.flatten(1).std(1)
    expected = torch.where(NUMBER == 1, both, 2.0 * red)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    reward, gradient = field()(x, NUMBER)
    torch.testing.assert_close(reward, expected.detach())
    torch.testing.assert_close(gradient, slope)
    assert not reward.requires_grad and not gradient.requires_grad
    # No weights get a gradient and no graph is left behind.
    assert x.grad is None and SPECS[0].reward.scale.grad is None  # type: ignore[union-attr]
    assert all(p.grad is None for p in DECODER.parameters())


def test_the_reward_is_the_one_of_training_for_prompts_it_applies_to():
    # The reward is the one of training up to the rounding of images.
    with torch.no_grad():
        images = DECODER.decode(X0)
    texts = [PROMPTS[i] for i in NUMBER.tolist()]
    specs = trained(SPECS)
    result = score(specs, images, texts, [{}] * 5)
    expected, _ = combine(specs, result)
    torch.testing.assert_close(field()(X0, NUMBER)[0], expected, rtol=0, atol=2 / 255)
    # A recipe keeps a reward to some prompts.
    data = ({"tag": "x"}, {}, {"tag": "y"})
    specs = [SPECS[0], RewardSpec(name="length", reward=Length(), applies_to={"tag": ("x",)})]
    _, gradient = differentiate(specs, torch.rand(3, 3, 4, 4), [*PROMPTS], [*data])
    green = gradient[:, 1].flatten(1).any(1)  # red has no gradient there
    assert green.tolist() == [True, False, False]


def test_batch_sizes_and_autocast_change_nothing():
    for size in [1, 2, 5]:
        one, whole = field(batch_size=size)(X0, NUMBER), field()(X0, NUMBER)
        torch.testing.assert_close(one, whole)
    # It works where gradients are off and in autocast.
    low = X0.bfloat16()
    expected = field()(low.float(), NUMBER)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = field()(low, NUMBER)
    assert {t.dtype for t in found} == {torch.float32}
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_images_without_a_score_have_no_reward_and_no_gradient():
    # An image without a score is nan and leaves the others alone.
    number = torch.tensor([0, 2, 0, 1, 2])
    reward, gradient = field()(X0, number)
    lost = number == 2
    assert reward[lost].isnan().all() and gradient[lost].isnan().all()
    kept = field()(X0[~lost], number[~lost])
    torch.testing.assert_close((reward[~lost], gradient[~lost]), kept)
    # Prompts that no reward applies to are nan.
    reward, gradient = field([SPECS[1]])(X0, NUMBER)
    assert reward.isnan().tolist() == (NUMBER == 0).tolist()
    assert gradient.isnan().flatten(1).all(1).tolist() == (NUMBER == 0).tolist()
    # Pixels of images without a reward have no gradient.
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    texts = [*PROMPTS]
    for specs, lost in ((SPECS, [False, False, True]), (SPECS[1:2], [True, False, True])):
        reward, gradient = differentiate(trained(specs), images, texts, [{}] * 3)
        assert reward.isnan().tolist() == lost
        assert (gradient == 0).flatten(1).all(1).tolist() == lost


def test_rewards_without_a_gradient_are_refused():
    # Rewards that do not say they are differentiable are refused before training.
    hidden = RewardSpec(name="ocr", reward=lambda *_: [0.0])
    check_differentiable(SPECS, "refl")
    check_differentiable(
        [*SPECS, RewardSpec(name="x", reward=hidden.reward, held_out=True)], "refl"
    )
    with pytest.raises(UserError, match="objective.kind refl .* reward 'ocr' does not say"):
        check_differentiable([*SPECS, hidden], "refl")


def test_rewards_that_fail_or_that_gradients_do_not_reach_are_named():
    for answer in [
        lambda images, *_: images.detach().flatten(1).mean(1),
        lambda images, *_: [0.5] * len(images),
        lambda images, *_: torch.nn.Parameter(torch.ones(len(images))) * 2,
    ]:
        spec = RewardSpec(name="mine", reward=answer)
        with pytest.raises(RewardFailure, match="'mine' says .* no gradient reaches the images"):
            differentiate([spec], torch.rand(2, 3, 4, 4), ["a", "b"], [{}, {}])

    # Failing and malformed rewards are named.
    def fails(images, prompts, metadata):
        raise KeyError("no such key")

    for reward, message in (
        (fails, "'mine' failed while its gradient was taken: KeyError"),
        (lambda images, *_: images.mean()[None], "answered with shape .1,. for 2 images"),
    ):
        with pytest.raises(RewardFailure, match=message):
            spec = RewardSpec(name="mine", reward=reward)
            differentiate([spec], torch.rand(2, 3, 4, 4), ["a", "b"], [{}, {}])

"""Images through several rewards: rounded once, asked once, in their phase, with reasons."""

import math
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.scorer import SamplerFailure, Scoring, quantise, score
from flowrl.scoring.spec import RewardResult, RewardSpec

IMAGES = torch.arange(4)[:, None, None, None].expand(4, 3, 8, 8) / 4
PROMPTS = ["a", "b", "c", "d"]
PLAIN: list[dict] = [{}, {}, {}, {}]


def constant(images, prompts, metadata):
    return [0.25] * len(images)


def mean(images, prompts, metadata):
    return images.mean((1, 2, 3))


def missing_package(images, prompts, metadata):
    raise ModuleNotFoundError("No module named 'detector'")


class Tagged:
    """Applies to prompts with a tag, and remembers what it was shown."""

    required_metadata = ("tag",)

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, images, prompts, metadata):
        self.seen += prompts
        return [1.0] * len(images)


class Unsure(Tagged):
    """Fails when it has to tell whether it applies."""

    required_metadata = ()

    def applies(self, prompt, metadata):
        raise KeyError("tag")


def scored(*rewards, images=IMAGES, metadata=PLAIN, **options: Any) -> RewardResult:
    specs = [RewardSpec(name=f"r{i}", reward=r, **options) for i, r in enumerate(rewards)]
    return score(specs, images, PROMPTS, metadata)


def test_images_are_rounded_once_and_given_as_copies():
    def destroy(images, prompts, metadata):
        images.zero_()
        prompts.clear()
        metadata[0].clear()
        return [0.0] * len(images)

    data = [{"tag": "x"}, {}, {}, {}]
    result = scored(destroy, mean, images=IMAGES + 0.001, metadata=data)
    expected = [0, 64 / 255, 128 / 255, 192 / 255]
    assert result.scores[:, 1].tolist() == pytest.approx(expected)
    assert data[0] == {"tag": "x"} and PROMPTS == ["a", "b", "c", "d"]


def test_images_that_are_not_finite_are_the_samplers_failure():
    images = IMAGES.clone()
    images[1, 0, 0] = torch.tensor([torch.inf, -torch.inf] * 4)
    with pytest.raises(SamplerFailure, match="1 of 4 .*'b'"):
        scored(constant, images=images)
    assert torch.equal(quantise(torch.full((2, 3, 2, 2), 3e38)), torch.ones(2, 3, 2, 2))


def test_a_missing_score_has_a_reason_with_the_first_prompt():
    def raises(images, prompts, metadata):
        raise RuntimeError("engine died")

    result = scored(constant, raises, lambda *_: torch.tensor([0.0, math.nan, 1.0, 0.5]))
    assert result.valid.tolist()[0] == [True, False, True]
    assert result.valid.tolist()[1] == [True, False, False]
    assert "4 of 4 images: RuntimeError: engine died" in result.errors["r1"]
    assert "test_scorer.py" in result.errors["r1"] and "'a'" in result.errors["r1"]
    assert "1 of 4 images" in result.errors["r2"] and "'b'" in result.errors["r2"]


def test_a_reward_sees_what_it_applies_to_and_is_named_when_it_cannot_tell():
    tagged = Tagged()
    result = scored(constant, tagged, metadata=[{"tag": "x"}, {}, {}, {"tag": "y"}])
    assert tagged.seen == ["a", "d"]
    assert result.applicable[:, 1].tolist() == [True, False, False, True]
    with pytest.raises(UserError, match="'r0'.* 'a': KeyError"):
        scored(Unsure())
    with pytest.warns(UserWarning, match="'r0'"):
        assert not scored(Unsure(), held_out=True).applicable.any()


@pytest.mark.parametrize("reward, reason", [(missing_package, "detector"), (lambda *_: [1], "1,")])
def test_what_stops_a_trained_reward_leaves_an_untrained_one_without_scores(reward, reason):
    with pytest.raises(RewardFailure, match=reason):
        scored(constant, reward)
    for options in ({"held_out": True}, {"weight": 0.0}):
        result = scored(constant, reward, **options)
        assert result.valid.tolist() == [[True, False]] * 4 and reason in result.errors["r1"]


@pytest.mark.parametrize("phase", ["rollout", "evaluation"])
def test_a_reward_is_asked_in_its_phase_alone(phase):
    called: list[str] = []

    def make(name: str):
        return lambda images, *_: called.append(name) or [1.0] * len(images)

    specs = [
        RewardSpec(name=when, reward=make(when), when=when, held_out=True)  # pyright: ignore
        for when in ("rollout", "evaluation", "both")
    ]
    scoring = Scoring(specs=specs, phase=phase)
    scoring.add(IMAGES, PROMPTS, PLAIN)
    result = scoring.result()
    assert called == [name for name in result.names if name in (phase, "both")]
    assert result.applicable.all(0).tolist() == [name in called for name in result.names]


def test_scores_of_a_later_batch_stand_in_the_rows_of_its_images():
    scoring = Scoring(specs=[RewardSpec(name="mean", reward=mean)], phase="rollout")
    for part in (slice(0, 3), slice(3, 4)):
        scoring.add(IMAGES[part], PROMPTS[part], PLAIN[part])
    expected = score([RewardSpec(name="mean", reward=mean)], IMAGES, PROMPTS, PLAIN).scores
    assert torch.equal(scoring.result().scores, expected) and len(expected.unique()) == 4

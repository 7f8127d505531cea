import math
import time

import pytest
import torch

from flowrl.config.rewards import InlineOptions
from flowrl.errors import UserError
from flowrl.scoring import scorer as scoring
from flowrl.scoring.executors.base import InlineExecutor, RewardFailure
from flowrl.scoring.scorer import SamplerFailure, quantise, score
from flowrl.scoring.spec import RewardResult, RewardSpec

GREY = torch.full((4, 3, 8, 8), 0.5)
PROMPTS = ["a", "b", "c", "d"]
PLAIN: list[dict] = [{}, {}, {}, {}]


def scored(*rewards, images=GREY, metadata=PLAIN) -> RewardResult:
    specs = [RewardSpec(name=f"r{i}", reward=r) for i, r in enumerate(rewards)]
    return score(specs, images, PROMPTS, metadata)


def constant(images, prompts, metadata):
    return [0.25] * len(images)


def raises(images, prompts, metadata):
    raise RuntimeError("engine died")


class Tagged:
    """Speaks of prompts with a tag only, and remembers what it was shown."""

    required_metadata = ("tag",)

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, images, prompts, metadata):
        self.seen += prompts
        return [1.0] * len(images)


def test_images_are_rounded_once_and_given_as_copies():
    # Images are rounded to 8 bits once before any reward.
    seen = []

    def look(images, prompts, metadata):
        seen.append(images)
        return images.mean((1, 2, 3))

    scored(look, images=GREY + 0.001)
    assert torch.equal(seen[0], torch.full_like(GREY, 128 / 255))
    scored(look, images=GREY + 7)
    assert torch.equal(seen[1], torch.ones_like(GREY))

    # What a reward does to its arguments is not for the next to see.
    def destroy(images, prompts, metadata):
        images.zero_()
        prompts.clear()
        metadata[0].clear()
        return [0.0] * len(images)

    data = [{"tag": "x"}, {}, {}, {}]
    result = scored(destroy, lambda images, *_: images.mean((1, 2, 3)), metadata=data)
    assert result.scores[:, 1].tolist() == pytest.approx([128 / 255] * 4)
    assert data[0] == {"tag": "x"} and PROMPTS == ["a", "b", "c", "d"]


def test_images_that_are_not_finite_are_the_samplers_failure():
    # Broken images are the samplers failure.
    images = GREY.clone()
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(SamplerFailure, match="sampler failure: 1 of 4 .* for the prompt 'b'"):
        scored(constant, images=images)
    # Infinities that cancel are found and numbers that are only large are not.
    images = torch.zeros(2, 3, 2, 2)
    images[1, 0, 0] = torch.tensor([torch.inf, -torch.inf])
    with pytest.raises(SamplerFailure, match="1 of 2"):
        quantise(images)
    assert torch.equal(quantise(torch.full((2, 3, 2, 2), 3e38)), torch.ones(2, 3, 2, 2))


def test_a_score_that_is_missing_says_why_and_a_malformed_answer_stops():
    found = scored(constant, raises)
    assert found.scores[:, 0].tolist() == [0.25] * 4
    assert found.scores[:, 1].isnan().all() and not found.valid[:, 1].any()
    assert "4 of 4 images: RuntimeError: engine died" in found.errors["r1"]
    assert "test_scoring.py" in found.errors["r1"] and "(prompt 'a')" in found.errors["r1"]
    # A score that is no number is missing.
    for bad in [math.nan, math.inf, -math.inf]:
        rows = torch.tensor([0.0, bad, 1.0, 0.5])
        found = scored(lambda images, prompts, metadata, rows=rows: rows)
        assert found.valid[:, 0].tolist() == [True, False, True, True]
        assert found.scores[1, 0].isnan() and found.scores.dtype == torch.float32
    # An answer of the wrong length stops.
    with pytest.raises(RewardFailure, match=r"\(1,\) for 4 images"):
        scored(lambda images, prompts, metadata: [1.0])

    # A missing package stops with its name.
    def needs_more(images, prompts, metadata):
        import a_package_that_is_not_there  # noqa: F401  # pyright: ignore

    with pytest.raises(UserError, match="a_package_that_is_not_there"):
        scored(needs_more)


def test_a_reward_sees_what_it_applies_to_and_says_if_it_cannot_tell():
    tagged = Tagged()
    found = scored(constant, tagged, metadata=[{"tag": "x"}, {}, {}, {"tag": "y"}])
    assert tagged.seen == ["a", "d"]
    assert found.applicable[:, 1].tolist() == [True, False, False, True]
    assert found.valid[:, 1].tolist() == [True, False, False, True]
    # A reward that cannot tell whether it applies is named with the prompt.
    with pytest.raises(UserError, match="reward 'u' cannot tell .* prompt 'a': KeyError"):
        score([RewardSpec(name="u", reward=Unsure())], GREY, PROMPTS, PLAIN)
    watched = RewardSpec(name="u", reward=Unsure(), held_out=True)
    with pytest.warns(UserWarning, match="cannot tell"):
        assert not score([watched], GREY, PROMPTS, PLAIN).applicable.any()


def absent(images, prompts, metadata):
    raise ModuleNotFoundError("No module named 'detector'")


def short(images, prompts, metadata):
    return [1.0]


class Unsure:
    """Breaks when it is asked whether it applies."""

    def applies(self, prompt, metadata):
        raise KeyError("tag")

    def __call__(self, images, prompts, metadata):
        return [1.0] * len(images)


def test_what_stops_a_trained_reward_leaves_a_watched_one_without_scores():
    for watched in [{"held_out": True}, {"weight": 0.0}]:
        for reward, reason in [(absent, "No module named"), (short, "answered with shape")]:
            fine = RewardSpec(name="fine", reward=constant)
            with pytest.raises(RewardFailure, match=reason):
                score([fine, RewardSpec(name="r", reward=reward)], GREY, PROMPTS, PLAIN)
            result = score(
                [fine, RewardSpec(name="r", reward=reward, **watched)], GREY, PROMPTS, PLAIN
            )
            assert result.scores[:, 0].tolist() == [0.25] * 4 and not result.valid[:, 1].any()
            assert reason in result.errors["r"]


def test_a_wait_is_told_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr(scoring, "HEARTBEAT", 0.05)

    def late(images, prompts, metadata):
        time.sleep(0.2)
        return [1.0] * len(images)

    executor = InlineExecutor(late, "late", InlineOptions(background=True))
    score([RewardSpec(name="late", reward=late, executor=executor)], GREY, PROMPTS, PLAIN)
    executor.close()
    assert "waiting for reward 'late' for 0 s, 4 scores pending" in caplog.text

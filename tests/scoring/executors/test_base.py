"""What a reward may answer, and what becomes of each answer."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.scoring.executors.base import (
    Answer,
    RewardFailure,
    all_finite,
    ask,
    failed,
    read_answer,
    to_levels,
)

THREE = torch.zeros(3, 3, 4, 4)
NO_NUMBER = "the reward gave no finite number"


def asked(reward) -> Answer:
    return ask(reward, "mine", THREE, ["p"] * 3, [{}] * 3)


def test_scores_may_be_a_tensor_an_array_or_numbers():
    for answer in (
        [0.5, 1, 2.0],
        (0.5, 1, 2.0),
        torch.tensor([0.5, 1, 2], dtype=torch.float64, requires_grad=True),
        torch.tensor([0.5, 1, 2], dtype=torch.bfloat16),
        np.array([0.5, 1, 2]),
        [torch.tensor(0.5), np.float32(1), 2],
        ([0.5, 1, 2], {}),
    ):
        found = read_answer(answer, 3)
        scores, why = found.scores, found.reasons
        assert torch.equal(scores, torch.tensor([0.5, 1.0, 2.0])), answer
        assert scores.dtype == torch.float32 and not scores.requires_grad and why == {}, answer


@settings(max_examples=40)
@given(st.lists(st.none() | st.floats(width=32), max_size=6), st.data())
def test_what_is_no_finite_number_is_missing_with_a_reason_and_nothing_else_is(values, data):
    rows = st.integers(0, max(len(values) - 1, 0))
    given_reasons = data.draw(st.dictionaries(rows, st.text(min_size=1)))
    found = read_answer((values, given_reasons), len(values))
    scores, why = found.scores, found.reasons
    missing = {i for i, v in enumerate(values) if v is None or not math.isfinite(v)}
    missing |= {i for i in given_reasons if i < len(values)}
    assert {i for i, s in enumerate(scores.tolist()) if math.isnan(s)} == missing == set(why)
    assert all(scores[i].item() == values[i] for i in set(range(len(values))) - missing)
    assert all(why[i] == given_reasons.get(i, NO_NUMBER) for i in missing)


def test_a_row_with_a_reason_or_beyond_float32_has_failed_and_the_answer_is_left_as_it_was():
    for scores in ([0.0, 0.5], torch.tensor([0.0, 0.5])):
        read = read_answer((scores, {0: "engine failed", 7: "of another batch"}), 2)
        assert math.isnan(read.scores[0]) and read.scores[1] == 0.5
        assert read.reasons == {0: "engine failed"}
    read = read_answer([1e300, -1e300, 1.0], 3)
    assert read.scores.isnan().tolist() == [True, True, False] and set(read.reasons) == {0, 1}
    own = torch.tensor([math.inf, 1.0])
    read_answer(own, 2)
    assert own[0] == math.inf


def test_another_length_or_form_is_said():
    for answer, said in (
        ([1.0, 2.0], r"\(2,\).*\(3,\)"),
        (torch.zeros(3, 1), r"\(3, 1\)"),
        (0.5, r"\(\)"),
        (None, "NoneType"),
        ("0.5", "str"),
        (["0.5", "a", "b"], "list"),
        ({0: 1.0}, "dict"),
    ):
        with pytest.raises(ValueError, match=said):
            read_answer(answer, 3)
        with pytest.raises(RewardFailure, match=f"'mine'.*{said}"):
            asked(lambda *_, answer=answer: answer)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 255), min_size=1), st.floats(-0.49, 0.49))
def test_levels_are_those_of_a_file_the_nearest_within_the_range(expected, off):
    images = (torch.tensor(expected).double() + off) / 255
    assert to_levels(images).tolist() == expected and to_levels(images).dtype == torch.uint8
    assert to_levels(torch.tensor([-0.1, 1.1])).tolist() == [0, 255]


def test_failed_gives_every_image_the_reason():
    answer = failed(2, "no luck", 1.5)
    assert answer.scores.isnan().tolist() == [True, True]
    assert answer.reasons == {0: "no luck", 1: "no luck"} and answer.seconds == 1.5
    assert failed(0, "no luck").scores.shape == (0,)


def test_a_reward_is_asked_without_gradients_and_timed():
    seen = []

    def reward(images, prompts, metadata):
        seen.append((torch.is_grad_enabled(), images, prompts, metadata))
        time.sleep(0.02)
        return [1.0, None, 3.0], {1: "too dark"}

    answer = asked(reward)
    ((graded, images, *asked_about),) = seen
    assert not graded and torch.equal(images, THREE)
    assert asked_about == [["p"] * 3, [{}] * 3]
    assert answer.scores.tolist()[::2] == [1.0, 3.0] and answer.reasons == {1: "too dark"}
    assert 0.02 <= answer.seconds < 10


def raising(error: BaseException):
    def reward(images, prompts, metadata):
        raise error

    return reward


def test_what_a_reward_raises_is_why_its_scores_are_missing_unless_no_image_can_mend_it():
    for error in (RuntimeError("engine died"), KeyError("tag"), MemoryError("x")):
        answer = asked(raising(error))
        assert answer.scores.isnan().all()
        assert set(answer.reasons.values()) == {f"{type(error).__name__}: {error}"}
    with pytest.raises(UserError, match="'mine'.*no detector"):
        asked(raising(ImportError("no detector")))
    full = torch.cuda.OutOfMemoryError("full")
    for error in (RewardFailure("all over"), full, KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            asked(raising(error))
        assert caught.value is error


def test_levels_are_those_of_the_plain_formula_and_one_bad_pixel_is_found():
    images = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    images[0].flatten()[:6] = torch.tensor([0.5, 1.5, 2.5, 254.5, 0, 255]) / 255
    images[1].flatten()[:2] = torch.tensor([-0.1, 1.2])
    for own in (images, images.bfloat16(), images.double(), images.transpose(2, 3), images[:0]):
        plain = (own.float() * 255).round().clamp(0, 255).byte()
        assert torch.equal(to_levels(own), plain)
        assert all_finite(own)
    assert all_finite(torch.full((4,), 3e38))  # whose sum is infinite
    for bad in (math.nan, math.inf, -math.inf):
        broken = images.clone()
        broken[2, 1, 4, 6] = bad
        assert not all_finite(broken)

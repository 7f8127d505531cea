"""Rewards with planted faults are found out, and those without pass."""

import random
import re
import socket

import numpy as np
import pytest
import torch

from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import check_reward, preflight
from flowrl.scoring.executors.base import InlineExecutor, RewardFailure
from flowrl.scoring.spec import RewardSpec, load_reward
from rewards.fixtures import blank, fixture, square

PROMPTS = [PromptRecord(uid="0", text="a red square"), PromptRecord(uid="1", text="a cat")]


class Redness:
    """How much redder than blue; with one fault planted by name."""

    name = "redness"
    bounds = (-1.0, 1.0)
    version = "redness-1"

    def __init__(self, fault: str = ""):
        self.fault, self.asked = fault, []
        if fault == "not deterministic":
            self.deterministic = False

    def fixtures(self):
        return [
            fixture("red scores above blue", square("red", 32), square("blue", 32), "red"),
            fixture("red scores above paper", square("red", 48), blank(48), "red"),
        ]

    def __call__(self, images, prompts, metadata):
        self.asked.append(len(images))
        score = (images[:, 0] - images[:, 2]).mean((1, 2))
        noise = torch.rand(len(images))
        nan = torch.full_like(score, torch.nan)
        return {
            "constant": torch.full_like(score, 0.5),
            "zero": torch.zeros_like(score),
            "swapped": -score,
            "shifted by the batch": score - score.mean(),
            "sorted": score.sort().values,
            "random": score + 0.1 * noise,
            "not deterministic": score + 0.01 * noise,
            "out of bounds": 30 * score,
            "nan": nan,
            "nan alone": nan if len(images) == 1 else score,
            "a score for paper": torch.where(score > 0.01, score, nan),
            "too short": score[1:],
            "text": "good",
            "a column": score[:, None],
        }.get(self.fault, score)


def found(fault: str, **changes):
    spec = RewardSpec(name="redness", reward=Redness(fault), **changes)
    return check_reward(spec).findings


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("constant", "fixture 'red scores above blue' .* got 0.5, and the same for the second"),
        ("zero", "expected more for the first picture, got 0, and the same for the second, 0"),
        ("swapped", "expected more for the first picture, got -.* and more for the second"),
        ("shifted by the batch", "one picture got .* in other company .* expected the same"),
        ("sorted", "expected more for the first picture"),
        ("random", "expected the same within"),
        ("out of bounds", r"got the score .*, expected one in its bounds \[-1, 1\]"),
        ("nan", "no score for any of 4 pictures: the reward gave no finite number"),
        ("nan alone", "a picture got a score once and none the other time"),
        ("a score for paper", "expected a score, got none: the reward gave no finite number"),
        ("too short", r"shape \(1,\) for 2 pictures; expected \(2,\)"),
        ("text", "answered with str, expected numbers"),
        ("a column", r"expected \(2,\)"),
    ],
)
def test_a_planted_fault_is_a_problem_in_one_sentence(fault, says):
    torch.manual_seed(0)
    findings = found(fault)
    assert {finding.state for finding in findings} == {"problem"}
    told = " ".join(finding.detail for finding in findings)
    assert re.search(says, told), told
    assert all(finding.topic == "redness" and finding.remedy for finding in findings)
    assert all("\n" not in finding.detail for finding in findings)


def test_a_good_reward_passes_and_says_what_was_seen():
    (finding,) = found("")
    assert finding.state == "ok"
    assert "2 fixtures right, repeatable, scores" in finding.detail


def test_a_reward_that_says_it_is_not_deterministic_is_told_by_how_much():
    torch.manual_seed(0)
    (finding,) = found("not deterministic")
    assert finding.state == "ok" and "not deterministic: differs by up to 0.0" in finding.detail


def test_pictures_are_asked_for_alone_together_and_in_the_other_order():
    reward = Redness()
    check_reward(RewardSpec(name="redness", reward=reward))
    assert reward.asked == [2, 2, 1, 1, 1, 1]  # two sizes, which cannot go in one batch
    reward.asked.clear()
    checked = check_reward(RewardSpec(name="redness", reward=reward), calls=3)
    assert reward.asked[-3:] == [1, 1, 1]
    assert checked.latency > 0 and checked.rate > 0 and checked.pictures == 4


class Ranks:
    """Compares pictures of one prompt: the share of others that are darker."""

    scope = "group"

    def __init__(self):
        self.asked = []

    def __call__(self, images, prompts, metadata):
        self.asked.append((len(images), len(set(prompts))))
        bright = images.mean((1, 2, 3))
        return (bright[:, None] > bright).float().mean(1)


def test_groups_are_asked_for_whole():
    reward = Ranks()
    (finding,) = check_reward(RewardSpec(name="ranks", reward=reward), PROMPTS).findings
    assert finding.state == "ok", finding
    assert set(reward.asked) == {(4, 1)} and len(reward.asked) == 4


def test_a_group_may_have_more_pictures_than_the_two_that_are_compared():
    class Odd(Ranks):
        def fixtures(self):
            light, dark = blank(32), square("black", 32)
            return [fixture("light above dark", light, dark, others=[dark, dark])]

    reward = Odd()
    assert check_reward(RewardSpec(name="odd", reward=reward)).findings[0].state == "ok"
    assert set(reward.asked) == {(4, 1)}


@pytest.mark.parametrize("parts", [{"says": "x"}, {"better": torch.ones(3, 8, 9)}, {"worse": "a"}])
def test_a_fixture_with_wrong_parts_is_a_sentence(parts):
    class Wrong(Redness):
        def fixtures(self):
            whole = fixture("x", square("red", 8), square("blue", 8))
            return [parts if "says" in parts else whole | parts]

    (finding,) = check_reward(RewardSpec(name="wrong", reward=Wrong())).findings
    assert finding.state == "problem"
    assert "has a fixture without the right parts" in finding.detail


def missing_package(images, prompts, metadata):
    raise ModuleNotFoundError("No module named 'oldpackage'", name="oldpackage")


def missing_weights(images, prompts, metadata):
    raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")


def missing_server(images, prompts, metadata):
    raise ConnectionError("127.0.0.1:8000 cannot be reached")


def broken(images, prompts, metadata):
    raise RuntimeError("operator torchvision::nms does not exist")


def missing_in_other_words(images, prompts, metadata):
    raise ImportError("judging needs the package openai")


def missing_file(images, prompts, metadata):
    raise FileNotFoundError("weights.bin")


def refused(images, prompts, metadata):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        socket.create_connection(taken.getsockname())


@pytest.mark.parametrize(
    ("reward", "state", "remedy"),
    [
        (missing_in_other_words, "missing", "Install it"),
        (missing_file, "missing", "Download it once"),
        (refused, "missing", "Start the server"),
        (missing_package, "missing", "Install it"),
        (missing_weights, "missing", "Download it once"),
        (missing_server, "missing", "Start the server"),
        (broken, "problem", "Mend that"),
    ],
)
def test_what_is_not_there_is_told_apart_from_what_is_wrong(reward, state, remedy):
    (finding,) = check_reward(RewardSpec(name="x", reward=reward), PROMPTS).findings
    assert finding.state == state and remedy in finding.remedy


def test_a_function_without_fixtures_gets_plain_pictures_with_the_runs_own_prompts():
    seen = set()

    def bare(images, prompts, metadata):
        seen.update(prompts)
        return [1.0] * len(images)

    (finding,) = check_reward(RewardSpec(name="bare", reward=bare), PROMPTS).findings
    assert finding.detail.startswith("all pictures got the same score, 1: 8 plain pictures")
    assert seen == {"a red square", "a cat"}


def test_the_same_score_for_all_pictures_is_a_warning_that_stops_nothing():
    spec = RewardSpec(name="blind", reward=lambda images, prompts, metadata: [0.0] * len(images))
    (finding,) = preflight([spec], PROMPTS)
    assert finding.state == "warning" and "fixtures()" in finding.remedy


def test_random_generators_are_left_as_they_were():
    def draws(images, prompts, metadata):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        return [torch.rand(1).item() + np.random.rand() + random.random()] * len(images)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    preflight([RewardSpec(name="draws", reward=draws)], PROMPTS)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_before_training_a_trained_reward_that_is_wrong_stops_and_another_is_told():
    swapped = RewardSpec(name="swapped", reward=Redness("swapped"))
    with pytest.raises(RewardFailure, match="reward 'swapped' does not work.*red scores above"):
        preflight([swapped], PROMPTS)
    for part in ({"held_out": True}, {"weight": 0.0}):
        watched = RewardSpec(name="swapped", reward=Redness("swapped"), **part)
        findings = preflight([RewardSpec(name="fine", reward=Redness()), watched], PROMPTS)
        assert {finding.topic: finding.state for finding in findings} == {
            "fine": "ok",
            "swapped": "problem",
        }


def test_before_training_what_a_trained_reward_lacks_stops_too():
    with pytest.raises(RewardFailure, match="'x' .*cannot run"):
        preflight([RewardSpec(name="x", reward=missing_package)], PROMPTS)


def test_before_training_the_rewards_own_executor_is_asked():
    asked = []

    class Watched(InlineExecutor):
        def submit(self, images, prompts, metadata):
            asked.append(len(images))
            return super().submit(images, prompts, metadata)

    def refuse(images, prompts, metadata):
        raise AssertionError("asked without its executor")

    executor = Watched(Redness(), "redness")
    preflight([RewardSpec(name="redness", reward=refuse, executor=executor)], PROMPTS)
    assert sum(asked) == 8 + 8


def test_a_reward_with_nothing_to_say_to_the_prompts_is_not_asked():
    spec = RewardSpec(name="ocr", reward=load_reward("ocr"))
    assert preflight([spec], PROMPTS) == []
    assert preflight([spec], []) == []


def test_plain_pictures_have_the_size_of_those_that_will_be_drawn():
    seen = set()

    def sized(images, prompts, metadata):
        seen.add(tuple(images.shape[1:]))
        return images.mean((1, 2, 3))

    preflight([RewardSpec(name="sized", reward=sized)], PROMPTS, (48, 64))
    assert seen == {(3, 48, 64)}

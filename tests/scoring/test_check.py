"""Rewards with planted faults are found out, and those without pass."""

import re

import pytest
import torch
from flowrl_rewards.fixtures import blank, fixture, square

from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import check_before_training, check_named, check_reward
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import BUILT_IN, RewardSpec, load_reward

PROMPTS = [PromptRecord(uid="0", text="a red square"), PromptRecord(uid="1", text="a cat")]


class Redness:
    """How much redder than blue; with one fault planted by name."""

    name = "redness"
    bounds = (-1.0, 1.0)
    version = "redness-1"

    def __init__(self, fault: str = ""):
        self.fault = fault
        if fault == "not deterministic":
            self.deterministic = False

    def fixtures(self):
        return [
            fixture("red scores above blue", square("red", 32), square("blue", 32), "red"),
            fixture("red scores above paper", square("red", 48), blank(48), "red"),
        ]

    def __call__(self, images, prompts, metadata):
        score = (images[:, 0] - images[:, 2]).mean((1, 2))
        noise = torch.rand(len(images))
        nan = torch.full_like(score, torch.nan)
        return {
            "constant": torch.full_like(score, 0.5),
            "swapped": -score,
            "shifted by the batch": score - score.mean(),
            "random": score + 0.1 * noise,
            "not deterministic": score + 0.01 * noise,
            "out of bounds": score + 1.5,
            "nan": nan,
            "nan alone": nan if len(images) == 1 else score,
            "a score for paper": torch.where(score > 0.01, score, nan),
            "too short": score[1:],
        }.get(self.fault, score)


class Wordy(Redness):
    name, bounds = "wordy", (None, None)

    def __init__(self, liking: float):
        super().__init__()
        self.liking = liking

    def __call__(self, images, prompts, metadata):
        words = torch.tensor([float(len(prompt.split())) for prompt in prompts])
        return super().__call__(images, prompts, metadata) + self.liking * words


def found(fault: str):
    return check_reward(RewardSpec(name="redness", reward=Redness(fault)))


def test_a_planted_fault_is_a_problem_in_one_sentence():
    torch.manual_seed(0)
    for fault, says in (
        ("constant", "'red scores above blue' .* 0.5"),
        ("swapped", "'red scores above blue' .* -"),
        ("shifted by the batch", "another batch"),
        ("random", "the same within"),
        ("out of bounds", r"\[-1, 1\]"),
        ("nan", "4 images: .*finite"),
        ("nan alone", "once and none"),
        ("a score for paper", "expected a score, .*finite"),
        ("too short", r"\(1,\) .*\(2,\)"),
    ):
        finding = found(fault)
        assert finding.state == "problem" and finding.topic == "redness", fault
        assert re.search(says, finding.detail) and finding.remedy, (fault, finding)
        assert "\n" not in finding.detail, fault


def test_a_good_reward_passes_and_one_that_is_not_deterministic_is_told_by_how_much():
    torch.manual_seed(0)
    for fault, says in (("", "2 fixtures"), ("not deterministic", "up to 0.0")):
        finding = found(fault)
        assert finding.state == "ok" and says in finding.detail


def raising(error: Exception):
    def reward(images, prompts, metadata):
        raise error

    return reward


MISSING = ModuleNotFoundError("No module named 'oldpackage'", name="oldpackage")


def test_what_is_not_there_is_told_apart_from_what_is_wrong():
    hub = OSError("We couldn't connect to 'https://huggingface.co' to load the files")
    for error, state in (
        (MISSING, "missing"),
        (FileNotFoundError("weights.bin"), "missing"),
        (hub, "missing"),
        (ConnectionRefusedError(111, "Connection refused"), "missing"),
        (ValueError("127.0.0.1:8000 cannot be reached"), "missing"),
        (RuntimeError("operator torchvision::nms does not exist"), "problem"),
    ):
        spec = RewardSpec(name="x", reward=raising(error))
        finding = check_reward(spec, PROMPTS)
        assert finding.state == state and finding.remedy, error


def test_a_function_without_fixtures_gets_plain_images_of_the_runs_prompts_and_size():
    seen = set()

    def bare(images, prompts, metadata):
        seen.update((prompt, *images.shape[1:]) for prompt in prompts)
        return [1.0] * len(images)

    # The same score for all images is a warning that stops nothing.
    (finding,) = check_before_training([RewardSpec(name="bare", reward=bare)], PROMPTS, (48, 64))
    assert finding.state == "warning" and "fixtures()" in finding.remedy
    assert "8 plain images" in finding.detail
    assert seen == {("a red square", 3, 48, 64), ("a cat", 3, 48, 64)}


def test_before_training_a_trained_reward_that_is_wrong_or_lacks_something_stops():
    swapped, lacking = Redness("swapped"), raising(MISSING)
    for reward, says in ((swapped, "'x' .*red scores above"), (lacking, "'x' .*cannot run")):
        with pytest.raises(RewardFailure, match=says):
            check_before_training([RewardSpec(name="x", reward=reward)], PROMPTS)
    for part in ({"held_out": True}, {"weight": 0.0}):
        watched = RewardSpec(name="swapped", reward=swapped, **part)
        findings = check_before_training(
            [RewardSpec(name="fine", reward=Redness()), watched], PROMPTS
        )
        states = {finding.topic: finding.state for finding in findings}
        assert states == {"fine": "ok", "swapped": "problem"}


# On a machine without weights, packages and servers.
LACKING = (
    "pickscore clipscore hpsv2 aesthetic hpsv3 vlm_judge vlm_questions pairwise preference taste"
).split()


def test_every_built_in_reward_that_needs_nothing_passes_and_the_others_lack_something():
    assert all(check_named(name)[0].state != "ok" for name in LACKING)
    for name in set(BUILT_IN) - set(LACKING):
        (finding,) = check_named(name)
        assert finding.state == "ok", finding
        assert "right" in finding.detail, name  # it has fixtures
        assert load_reward(name).version in finding.detail


def test_a_liking_for_long_prompts_is_measured_on_the_same_images():
    for liking, states in ((0.0, ["ok"]), (0.005, ["ok", "ok"]), (-1.0, ["ok", "warning"])):
        results = check_named(f"{__name__}:Wordy", {"liking": liking})
        assert [result.state for result in results] == states, results
        if liking:
            assert f" {15 * liking:.2g}" in results[1].detail


def test_prompts_of_ones_own_are_counted_by_whether_the_reward_can_judge_them():
    def record(number: int, name: str) -> PromptRecord:
        wanted = {"tag": "single_object", "include": [{"class": name, "count": 1}]}
        return PromptRecord(uid=str(number), text=f"a {name}", metadata=wanted)

    square, dog = record(0, "square"), record(1, "dog")
    for prompts, state, counted in (
        ([square, square], "ok", "2 of 2 prompts"),
        ([square, dog], "problem", "1 of 2 prompts"),
    ):
        fits, judged = check_named("geneval", prompts=prompts)
        assert (fits.state, judged.state) == ("ok", state) and counted in judged.detail
    assert "'dog'" in judged.detail and "mask2former" in judged.detail

"""Before and after are the same prompts and noise, paired picture by picture."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl.build import Given, build_evaluator
from flowrl.evaluate import Evaluation, compare
from flowrl.reward import RewardSpec
from flowrl.runtime import Runtime


@pytest.fixture(scope="module")
def evaluator(tiny_config, load_tiny):
    specs = [
        RewardSpec(name="mean", reward=lambda images, *_: images.mean((1, 2, 3))),
        RewardSpec(name="length", reward=lambda _, prompts, __: [float(len(p)) for p in prompts]),
    ]
    settings = {"prompts": "tiny:colors:test", "images": 5, "steps": 2, "batch_size": 2}
    config = tiny_config(evaluation=settings)
    return replace(build_evaluator(config, load_tiny(), specs, Given()), keep=3)


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu")


@pytest.fixture(scope="module")
def evaluation(evaluator, runtime):
    return evaluator(evaluator.backbone.velocity, runtime)


def test_every_picture_is_scored_and_the_first_are_kept(evaluator, evaluation):
    assert evaluation.scores.shape == (5, 2) and evaluation.names == ("mean", "length")
    assert evaluation.images.shape == (3, 3, 64, 64) and evaluation.images.dtype == torch.uint8
    assert evaluation.prompts == tuple(p.text for p in evaluator.prompts[:3])
    assert evaluation.scores[:, 1].tolist() == [len(p.text) for p in evaluator.prompts]
    kept = (evaluation.images.float() / 255).mean((1, 2, 3))
    torch.testing.assert_close(kept, evaluation.scores[:3, 0])


def test_the_same_network_gets_the_same_scores_again(evaluator, evaluation, runtime):
    again = evaluator(evaluator.backbone.velocity, runtime)
    assert torch.equal(again.scores, evaluation.scores)
    assert [row.change.mean for row in compare(evaluation, again)] == [0, 0]


def test_a_repeated_prompt_is_drawn_from_other_noise(evaluator, runtime):
    twice = replace(evaluator, prompts=[evaluator.prompts[0]] * 2)
    result = twice(evaluator.backbone.velocity, runtime)
    assert result.draws == (0, 1)
    assert not torch.equal(result.images[0], result.images[1])


def test_a_process_with_no_share_adds_nothing(evaluator, runtime, monkeypatch):
    """Fewer pictures than processes: the last one has nothing to draw."""
    monkeypatch.setattr(Runtime, "share", lambda self, total: torch.arange(0))
    result = evaluator(evaluator.backbone.velocity, runtime)
    assert result.scores.shape == (0, 2) and len(result.images) == 0
    assert result.images.shape[1:] == (3, 64, 64) and result.images.dtype == torch.uint8


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"evaluation": {"steps": 3}}, False),
        ({"evaluation": {"seed": 1}}, False),
        ({"evaluation": {"images": 4}}, False),
        ({"evaluation": {"prompts": "tiny:counting:test"}}, False),
        ({"pipeline": {"dtype": "bf16"}}, False),
        ({"evaluation": {"batch_size": 1, "every": 7}, "optim": {"lr": 1.0}}, True),
    ],
)
def test_the_key_changes_with_whatever_changes_the_base_pictures(
    tiny_config, load_tiny, change, same
):
    settings = {"prompts": "tiny:colors:test", "images": 5, "steps": 2}
    specs = [RewardSpec(name="mean", reward=lambda images, *_: images.mean((1, 2, 3)))]

    def key(**changes):
        changes["evaluation"] = settings | changes.get("evaluation", {})
        return build_evaluator(tiny_config(**changes), load_tiny(), specs, Given()).key

    assert (key(**change) == key()) is same


def test_evaluations_come_back_from_disk(evaluation, tmp_path):
    evaluation.save(tmp_path / "e")
    again = Evaluation.load(tmp_path / "e")
    assert torch.equal(again.scores, evaluation.scores)
    assert torch.equal(again.images, evaluation.images)
    assert (again.names, again.prompts, again.draws) == (
        evaluation.names,
        evaluation.prompts,
        evaluation.draws,
    )


def scored(*rows: list[float], names=("a", "b")) -> Evaluation:
    return Evaluation(
        scores=torch.tensor(rows), names=names, images=torch.empty(0), prompts=(), draws=(), key=""
    )


def test_only_pictures_with_both_scores_are_compared():
    before = scored([0.0, math.nan], [1.0, math.nan], [math.nan, math.nan])
    after = scored([1.0, 5.0], [math.nan, 5.0], [9.0, 5.0])
    (row,) = compare(before, after)
    assert (row.name, row.pairs, row.before, row.after, row.change.mean) == ("a", 1, 0, 1, 1)


def test_rewards_are_matched_by_name():
    (a, b) = compare(scored([0.0, 1.0]), scored([3.0, 2.0], names=("b", "a")))
    assert (a.name, a.after) == ("a", 2) and (b.name, b.after) == ("b", 3)


def test_means_leave_missing_scores_out():
    assert scored([1.0, math.nan], [3.0, math.nan]).mean("a") == 2
    assert math.isnan(scored([1.0, math.nan]).mean("b"))

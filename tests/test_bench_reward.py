"""What `flowrl bench reward` measures; how fast it is, is not a test's business."""

import pytest
import torch

from flowrl.bench.reward import _job, _Question, _questions, bench_reward
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.spec import RewardSpec, load_reward


def test_a_pool_stands_beside_this_process():
    rows = bench_reward(name="brightness", pictures=6, workers=(1,), micro_batch=3, repeats=1)
    assert [(row["job"], row["to"]) for row in rows] == [
        ("this process", "this process"),
        ("1 process", "this process"),
    ]
    for row in rows:
        assert row["pictures/s"] * row["seconds"] == pytest.approx(6)
        assert row["ratio"] == pytest.approx(row["pictures/s"] / rows[0]["pictures/s"])


@pytest.mark.parametrize("name, tags", [("ocr", {"ocr"}), ("brightness", None)])
def test_a_reward_is_shown_pictures_of_every_size_that_it_applies_to(name, tags):
    spec = RewardSpec(name=name, reward=load_reward(name))
    made = _questions(spec, 8, (64, 96, 128))
    assert [tuple(q.images.shape) for q in made] == [
        (3, 3, 64, 64),
        (3, 3, 96, 96),
        (2, 3, 128, 128),
    ]
    for question in made:
        assert torch.equal((question.images * 255).round() / 255, question.images)
        assert len(question.prompts) == len(question.metadata) == len(question.images)
        assert question.images.flatten(1).std(1).min() > 0.05  # something is drawn
        assert tags is None or {data["tag"] for data in question.metadata} == tags


def test_too_few_pictures_to_compare_with_are_refused():
    with pytest.raises(UserError, match="4 pictures do not keep 2 processes busy.* 8 or more"):
        bench_reward(name="brightness", pictures=4, micro_batch=4)


class Picky:
    required_metadata = ("something else",)


def test_a_reward_that_applies_to_nothing_here_has_no_speed():
    with pytest.raises(UserError, match="applies to none"):
        _questions(RewardSpec(name="x", reward=Picky()), 2, (64,))  # pyright: ignore


def test_a_picture_without_a_score_is_told():
    def blind(images, prompts, metadata):
        raise RuntimeError("nothing to see")

    image, executor = torch.zeros(1, 3, 8, 8), InlineExecutor(blind, "blind")
    question = _Question(images=image, prompts=["p"], metadata=[{}])
    with pytest.raises(UserError, match="no score, so there is no speed.*nothing to see"):
        _job(executor, [question])()

"""What `flowrl bench reward` and `tree` measure; how fast it is, is not a test's business."""

import pytest
import torch

from flowrl.bench import rollout as bench_tree
from flowrl.bench.reward import _job, _Question, _questions, bench_reward
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.spec import RewardSpec, load_reward


def test_a_pool_stands_beside_this_process():
    rows = bench_reward(name="brightness", images=6, workers=(1,), micro_batch=3, repeats=1)
    assert [(row["job"], row["to"]) for row in rows] == [
        ("this process", "this process"),
        ("1 process", "this process"),
    ]
    for row in rows:
        assert row["images/s"] * row["seconds"] == pytest.approx(6)
        assert row["ratio"] == pytest.approx(row["images/s"] / rows[0]["images/s"])


def test_a_reward_is_shown_images_of_every_size_that_it_applies_to():
    for name, tags in [("ocr", {"ocr"}), ("brightness", None)]:
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


class Picky:
    required_metadata = ("something else",)


def test_what_has_no_speed_is_refused():
    def blind(images, prompts, metadata):
        raise RuntimeError("nothing to see")

    with pytest.raises(UserError, match="4 images do not keep 2 processes busy.* 8 or more"):
        bench_reward(name="brightness", images=4, micro_batch=4)
    with pytest.raises(UserError, match="applies to none"):
        _questions(RewardSpec(name="x", reward=Picky()), 2, (64,))  # pyright: ignore
    image, executor = torch.zeros(1, 3, 8, 8), InlineExecutor(blind, "blind")
    question = _Question(images=image, prompts=["p"], metadata=[{}])
    with pytest.raises(UserError, match="no score, so there is no speed.*nothing to see"):
        _job(executor, [question])()


@pytest.mark.slow
def test_ratios_stand_beside_those_of_the_plans_own_counts(tiny_pipeline_path, monkeypatch):
    def measured(jobs, repeats):
        jobs["update pruned"](), jobs["sample tree"]()
        return {name: 2.0 + i**2 for i, name in enumerate(jobs)}

    monkeypatch.setattr(bench_tree, "best_of", measured)
    rows = bench_tree.bench_tree(
        model=tiny_pipeline_path, prompts=1, batch=16, steps=13, threads=1, repeats=1, device="cpu"
    )
    tree = 1 + 2 * 3 + 4 * 3 + 8 * 3 + 16 * 3  # nodes with children at T = 13, splits 0, 3, 6, 9
    chains, last = 16 * 13, 16
    assert [row["by counts"] for row in rows] == [
        tree / chains,
        (tree - last) / (chains - last),
        (tree - last - 2 * 16) / (tree - last),  # steps 10 and 11 of 13 are left out
    ]
    assert [row["ratio"] for row in rows] == [3 / 2, 11 / 6, 18 / 11]
    for row in rows:
        assert row["ratio"] == row["s"] / row["its s"]
        assert row["of counts"] == row["ratio"] / row["by counts"]

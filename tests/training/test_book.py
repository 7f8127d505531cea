"""Training with the prompt book: what it is told, and what is learned from."""

import pytest
import torch
from crashes import SMALLEST

from flowrl.assembly.learner import ProvidedObjects, all_prompts_to_encode
from flowrl.backbones.policy import POLICY
from flowrl.config.objectives import AdvantageOptions
from flowrl.errors import UserError
from flowrl.objectives.advantage import FLOOR, image_advantages, z_scores
from flowrl.training.loop import train
from flowrl.training.tracking import read_metrics

SMALL = SMALLEST | {"prompts_per_iteration": 2, "tree": {"kind": "flow_grpo"}}


def test_one_image_of_a_prompt_is_learned_from_and_remembered(make_run, monkeypatch):
    monkeypatch.setattr("flowrl.prompts.book.IDLE_DECAY", 1.0)
    _, learner, run = make_run(
        rollout=SMALL | {"group_size": 1},
        prompts={"train": "tiny:colors:train", "book": {"choose": "uniform", "decay": 1}},
        objective={"kind": "grpo", "advantage": {"center": "tracker", "emphasis": 1.0}},
    )
    with run.session():
        train(learner, run, iterations=4)
    memories = learner.book.state_dict()["memories"].values()
    assert sum(m["draws"] for m in memories) == 8
    assert all(m["successes"] + m["failures"] == m["draws"] for m in memories)
    rows = read_metrics(run.folder)
    assert all(row["grad/norm"] > 0 and row["book/drawn"] > 0 for row in rows)
    mean = sum(m["total"] for m in memories) / 8  # of the rewards of all iterations
    assert mean == pytest.approx(sum(row["reward/mean"] for row in rows) / 4)


def test_images_of_several_places_are_compared_as_one_group(make_learner, tmp_path):
    (tmp_path / "few.txt").write_text("red\ngreen\n")
    book = {"choose": "uniform", "success": 2.0, "largest_group": 4}
    learner = make_learner(
        rollout=SMALL | {"prompts_per_iteration": 5},
        prompts={"train": str(tmp_path / "few.txt"), "book": book},
        objective={"kind": "grpo"},
    )
    assert set(learner.book.sizes(0).values()) == {1}  # of two images of a new prompt one succeeds
    rollout, metrics = learner.iterate(0)
    uid = [rollout.prompts[p] for p in rollout.tree.prompt.tolist()]
    assert metrics["grad/norm"] > 0 and sorted(map(uid.count, set(uid))) == [4, 6]
    advantage = z_scores(rollout.reward.double(), rollout.group, AdvantageOptions())
    for name in set(uid):
        rows = torch.tensor([name == other for other in uid])
        reward = rollout.reward[rows].double()
        expected = (reward - reward.mean()) / (reward.std(correction=0) + FLOOR)
        torch.testing.assert_close(advantage[rows], expected, rtol=1e-12, atol=0)
    assert torch.equal(image_advantages(rollout, AdvantageOptions())[0], advantage.float())


@pytest.mark.parametrize(
    "whole", [{"objective": {"kind": "gdro"}}, {"specs": [{"name": "diversity"}]}], ids=str
)
def test_whole_groups_are_not_spread_over_processes(make_learner, whole):
    prompts = {"train": "tiny:colors:train", "book": {"largest_group": 8}}
    with pytest.raises(UserError, match="prompts.book.largest_group"):
        make_learner(prompts=prompts, **whole)


def test_a_book_that_only_remembers_changes_no_bit_of_a_run(make_learner):
    weights = []
    for book in (None, {"choose": "uniform"}):
        learner = make_learner(rollout=SMALL, prompts={"train": "tiny:colors:train", "book": book})
        for iteration in range(2):
            _, metrics = learner.iterate(iteration)
        weights.append(learner.policy.weights(POLICY))
        assert ("book/success" in metrics) == (book is not None) and metrics["grad/norm"] > 0
    assert all(map(torch.equal, *weights))


def test_all_prompts_are_encoded_ahead_since_any_may_be_chosen(tiny_config):
    free = {"memory": {"text_encoders": "free"}}
    counts = [
        len(all_prompts_to_encode(tiny_config(prompts={"book": book}, **free), ProvidedObjects()))
        for book in (None, {})
    ]
    assert counts[0] == 4 < counts[1]

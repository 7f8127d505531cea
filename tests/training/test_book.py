"""Training with the prompt book: what it is told, and runs that go on with what it remembers."""

import pytest
import torch
from crashes import SMALLEST
from safetensors.torch import load_file

from flowrl.assembly.learner import ProvidedObjects, all_prompts_to_encode
from flowrl.backbones.lora_formats import FILE
from flowrl.backbones.policy import POLICY
from flowrl.config.objectives import AdvantageOptions
from flowrl.errors import UserError
from flowrl.objectives.advantage import FLOOR, image_advantages, z_scores
from flowrl.training.checkpoint import Checkpoints, read_checkpoint
from flowrl.training.loop import train
from flowrl.training.tracking import read_metrics

SMALL = SMALLEST | {"prompts_per_iteration": 2, "tree": {"kind": "flow_grpo"}}
TRACKER = {"kind": "grpo", "advantage": {"center": "tracker", "emphasis": 1.0}}


@pytest.fixture
def trained(make_run, tmp_path):
    """Train the tiny pipeline with a book; return the run, its learner and the texts it drew."""

    few = tmp_path / "few.txt"
    few.write_text("red\ngreen\nblue\n")

    def make(resume=None, *, book, rollout=SMALL, objective=TRACKER):
        _, learner, run = make_run(
            resume, rollout=rollout, objective=objective,
            prompts={
                "train": str(few) if "largest_group" in book else "tiny:colors:train", "book": book,
            },
            run={"iterations": 4, "checkpoint_every": 1, "keep_checkpoints": 9},
        )  # fmt: skip
        texts, collect = [], type(learner.source).collect

        def watched(source, iteration, timer):
            rollout = collect(source, iteration, timer)
            texts.append(rollout.prompts)
            return rollout

        with pytest.MonkeyPatch.context() as patch, run.session():
            patch.setattr(type(learner.source), "collect", watched)
            train(learner, run, iterations=4)
        return run, learner, texts

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "book",
    [{"choose": "thompson"}, {"choose": "predictive"}, {"choose": "uniform", "largest_group": 4}],
    ids=str,
)
def test_a_resumed_run_chooses_and_learns_the_same_bit_for_bit(trained, book):
    book |= {"success": 0.89}
    whole, learner, texts = trained(book=book)
    lora, state = load_file(whole.folder / FILE), learner.book.state_dict()
    resumed, again, later = trained(read_checkpoint(whole.checkpoints.path(2)), book=book)
    assert later == texts[2:]
    after = load_file(resumed.folder / FILE)
    assert all(torch.equal(lora[name], after[name]) for name in lora)
    assert again.book.state_dict() == state
    # Without what it remembers it would have gone on with other prompts, or other estimates.
    forgotten = read_checkpoint(Checkpoints(whole.folder, keep=9).path(2)) | {"book": None}
    assert trained(forgotten, book=book)[1].book.state_dict() != state


def test_one_image_of_a_prompt_is_learned_from_and_remembered(trained, monkeypatch):
    monkeypatch.setattr("flowrl.prompts.book.IDLE_DECAY", 1.0)
    book = {"choose": "uniform", "decay": 1}
    run, learner, texts = trained(book=book, rollout=SMALL | {"group_size": 1})
    memories = learner.book.state_dict()["memories"].values()
    assert sum(m["draws"] for m in memories) == 8 == sum(map(len, texts))
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

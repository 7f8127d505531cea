"""Stored rollouts: whole groups, a function of seed, iteration and store alone."""

import pytest
import torch
from toy_store import GROUPS, SHAPE, SIZE, Process, numbers, plain_scores, read, source, spec

from flowrl.training.metrics import rollout_metrics


def test_pictures_scores_and_prompts_belong_together(store):
    rollout = read(source(store, specs=[spec("b", weight=-2.0), spec("a")]), 4)
    seen = numbers(rollout)
    assert torch.equal(rollout.scores, plain_scores()[seen][:, [1, 0]])
    torch.testing.assert_close(rollout.reward, 2.01 * seen)
    assert rollout.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    group = seen // SIZE
    assert [len(rollout.prompts[i]) for i in rollout.tree.prompt] == (group + 1).tolist()
    lengths = rollout.cond.take(rollout.tree.prompt).tensors["length"]
    assert torch.equal(lengths, group + 1)
    assert rollout.metadata[0]["kind"] == ("round" if int(group[0]) % 2 else "square")
    assert rollout.weights.tolist() == [-2.0, 1.0] and bool(rollout.valid.all())


def test_a_tree_is_a_clean_root_with_nothing_to_learn_from_on_its_way(store):
    tree = read(source(store), 0).tree
    assert tree.x.shape == (12, 1, *SHAPE) and len(tree) == 12
    assert tree.sigmas[tree.step].tolist() == [0.0]
    assert torch.equal(tree.sigmas, torch.linspace(1, 0, 6).sqrt())
    assert tree.mean_old.shape == (12, 0, *SHAPE) and not len(tree.edge) and not len(tree.noisy)
    assert tree.parent.tolist() == [-1] and tree.leaf.tolist() == [0] and tree.forwards == 0


def test_an_epoch_shows_every_group_once_and_each_visit_other_pictures(store):
    groups = source(store, prompts=1, group_size=3)
    epochs = [[read(groups, e * GROUPS + i) for i in range(GROUPS)] for e in range(3)]
    orders = [[int(numbers(r)[0]) // SIZE for r in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(GROUPS)) for order in orders)
    assert orders[0] != orders[1]
    picks = {tuple(numbers(r).tolist()) for epoch in epochs for r in epoch}
    assert len(picks) > 2 * GROUPS
    assert all(len(set(pick)) == 3 and len({n // SIZE for n in pick}) == 1 for pick in picks)


@pytest.mark.parametrize("size", [SIZE, 50])
def test_a_group_that_is_asked_for_more_gives_all_it_has(store, size):
    seen = numbers(read(source(store, group_size=size), 1)).view(3, SIZE)
    assert torch.equal(seen - seen[:, :1], torch.arange(SIZE).expand(3, -1))


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_whole_groups_of_what_one_process_reads(store, processes):
    whole = read(source(store), 5)
    parts = [
        read(source(store, process=Process(world_size=processes, rank=r)), 5)
        for r in range(processes)
    ]
    assert torch.equal(torch.cat([numbers(p) for p in parts]), numbers(whole))
    assert torch.equal(torch.cat([p.trees for p in parts]), whole.trees)
    for part in parts:
        assert torch.equal(part.reward, whole.reward) and torch.equal(part.group, whole.group)
        assert len(part.trees) % 4 == 0 and len(part.trees)
        assert [len(part.prompts[i]) for i in part.tree.prompt] == (
            numbers(part) // SIZE + 1
        ).tolist()


def test_what_is_read_depends_on_seed_and_iteration_alone(store):
    groups = source(store)
    first = numbers(read(groups, 3))
    read(groups, 0)
    assert torch.equal(numbers(read(groups, 3)), first)
    assert torch.equal(numbers(read(source(store), 3)), first)
    assert not torch.equal(numbers(read(source(store, seed=1), 3)), first)
    assert not torch.equal(numbers(read(groups, 4)), first)


def test_a_kind_can_be_shown_as_often_as_another(store):
    rollout = read(source(store, prompts=4, balance="kind"), 0)
    assert sorted(m["kind"] for m in rollout.metadata) == ["round"] * 2 + ["square"] * 2


def test_a_stored_rollout_is_measured_without_pictures(store):
    rollout = read(source(store), 0)
    metrics = rollout_metrics(rollout)
    assert rollout.images.shape == (0, 3, 16, 24)
    assert "image/brightness" not in metrics and metrics["tree/leaves"] == 12
    assert metrics["reward/a"] == pytest.approx(rollout.scores.mean().item())
    assert metrics["groups/no_signal"] == 0 and metrics["tree/forwards"] == 0

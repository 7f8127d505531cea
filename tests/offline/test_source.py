"""Stored rollouts: whole groups, a function of seed, iteration and store alone."""

import pytest
import torch
from toy_dataset import GROUPS, SHAPE, SIZE, Process, numbers, plain_scores, read, source, spec

from flowrl.training.metrics import rollout_metrics
from flowrl.utils.distributed import Runtime


def test_images_scores_and_prompts_belong_together_without_a_tree(store):
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
    # A tree is a clean root with nothing to learn from on its way.
    tree = read(source(store), 0).tree
    assert tree.x.shape == (12, 1, *SHAPE) and len(tree) == 12
    assert tree.sigmas[tree.step].tolist() == [0.0]
    assert torch.equal(tree.sigmas, torch.linspace(1, 0, 6).sqrt())
    assert tree.mean_old.shape == (12, 0, *SHAPE) and not len(tree.edge) and not len(tree.noisy)
    assert tree.parent.tolist() == [-1] and tree.leaf.tolist() == [0] and tree.forwards == 0
    # A stored rollout is measured without images.
    rollout = read(source(store), 0)
    metrics = rollout_metrics(rollout, Runtime(device="cpu"))
    assert rollout.images.shape == (0, 3, 16, 24)
    assert "image/brightness" not in metrics and metrics["tree/leaves"] == 12
    assert metrics["reward/a"] == pytest.approx(rollout.scores.mean().item())
    assert metrics["groups/no_signal"] == 0 and metrics["tree/forwards"] == 0


def test_groups_are_whole_and_dealt_to_processes(store):
    # A group that is asked for more gives all it has.
    for size in [SIZE, 50]:
        seen = numbers(read(source(store, group_size=size), 1)).view(3, SIZE)
        assert torch.equal(seen - seen[:, :1], torch.arange(SIZE).expand(3, -1))
    # Processes share whole groups of what one process reads.
    for processes in [2, 3]:
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


def test_a_rollout_depends_on_seed_and_iteration_alone(store):
    groups = source(store)
    first = numbers(read(groups, 3))
    read(groups, 0)
    assert torch.equal(numbers(read(groups, 3)), first)
    assert torch.equal(numbers(read(source(store), 3)), first)
    assert not torch.equal(numbers(read(source(store, seed=1), 3)), first)
    assert not torch.equal(numbers(read(groups, 4)), first)
    # A kind can be shown as often as another.
    rollout = read(source(store, prompts=4, balance="kind"), 0)
    assert sorted(m["kind"] for m in rollout.metadata) == ["round"] * 2 + ["square"] * 2
    # Or more often; kinds of which nothing is stored are no mistake.
    weights = {"round": 3, "lost": 2, "left out": 0}
    rollout = read(source(store, prompts=4, balance="kind", weights=weights), 0)
    assert sorted(m["kind"] for m in rollout.metadata) == ["round"] * 3 + ["square"]
    # An epoch shows every group once and each visit other images.
    groups = source(store, prompts=1, group_size=3)
    epochs = [[read(groups, e * GROUPS + i) for i in range(GROUPS)] for e in range(3)]
    orders = [[int(numbers(r)[0]) // SIZE for r in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(GROUPS)) for order in orders)
    assert orders[0] != orders[1]
    picks = {tuple(numbers(r).tolist()) for epoch in epochs for r in epoch}
    assert len(picks) > 2 * GROUPS
    assert all(len(set(pick)) == 3 and len({n // SIZE for n in pick}) == 1 for pick in picks)

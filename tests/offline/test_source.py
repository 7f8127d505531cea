"""Stored rollouts: whole groups, a function of seed, iteration and store alone."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toy_dataset import (
    GROUPS,
    SHAPE,
    SIZE,
    Backbone,
    OnlyRound,
    Process,
    numbers,
    plain_scores,
    read,
    source,
    spec,
    write,
)

from flowrl.errors import UserError
from flowrl.offline.source import check_dataset
from flowrl.scoring.spec import RewardSpec
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


# --- a store under a recipe --------------------------------------------------------------------


def test_missing_scores_leave_images_out(tmp_path, store):
    # Images without a reward are never read and groups of one are skipped.
    scores = plain_scores()
    scores[0, 0] = math.nan
    scores[SIZE : 2 * SIZE - 1, 0] = math.nan  # group 1 has one left
    groups = source(write(tmp_path / "s", scores), group_size=SIZE, prompts=GROUPS - 1)
    assert groups.sampler.skipped == 1
    rollout = read(groups, 0)
    assert bool(rollout.valid.all()) and bool(rollout.reward.isfinite().all())
    assert sorted(numbers(rollout).tolist()) == [*range(1, SIZE), *range(2 * SIZE, GROUPS * SIZE)]
    # A held out reward may be missing.
    rollout = read(source(store, specs=[spec(), spec("new", held_out=True)]), 0)
    assert bool(rollout.valid.all()) and bool(rollout.scores[:, 1].isnan().all())


def test_a_reward_that_does_not_apply_is_no_missing_score(tmp_path):
    """The others take its weight; where it applies, the image without it is left out."""
    scores = plain_scores()
    scores[:, 1] = math.nan
    store = write(tmp_path / "s", scores)
    specs = [spec("a"), RewardSpec(name="b", reward=OnlyRound())]
    groups = source(store, specs=specs, prompts=4)
    assert groups.sampler.skipped == 3
    rollout = read(groups, 0)
    assert {m["kind"] for m in rollout.metadata} == {"square"}
    torch.testing.assert_close(rollout.reward, 2 * rollout.scores[:, 0])


def test_the_recipes_prompts_hold_for_stored_scores(tmp_path):
    scores = plain_scores()
    store = write(tmp_path / "s", scores)
    specs = [spec("a"), spec("b", applies_to={"kind": ["square"]})]
    rollout = read(source(store, specs=specs, group_size=SIZE, prompts=GROUPS), 0)
    images, square = numbers(rollout), numbers(rollout) // SIZE % 2 == 0
    torch.testing.assert_close(rollout.scores, scores[images], equal_nan=True)
    assert bool(rollout.valid.all()) and torch.equal(rollout.applicable[:, 1], square)
    assert bool(rollout.applicable[:, 0].all())
    total = torch.where(square, scores[images].sum(1), 2 * scores[images, 0])
    torch.testing.assert_close(rollout.reward, total)


def refuse(store, sentence, *, pipeline="here/tiny/", family="sd3", **backbone):
    given = Backbone()
    for name, value in backbone.items():
        setattr(given, name, value)
    with pytest.raises(UserError, match=sentence):
        check_dataset(store, given, pipeline=pipeline, family=family)


def test_stores_that_do_not_fit_are_refused(store, tmp_path):
    # A store that does not fit is refused with the reason.
    check_dataset(store, Backbone(), pipeline="elsewhere/tiny", family="sd3")
    half = SimpleNamespace(metadata=replace(store.metadata, dtype="bfloat16"), folder=store.folder)
    refuse(store, "made with pipeline.path 'models/tiny', and this recipe", pipeline="models/sd3")
    refuse(store, "made with pipeline.path 'sd3', and this recipe has 'flux'", family="flux")
    refuse(
        store, r"have shape \[2, 2, 2\], and this pipeline makes \[1\]", latent_shape=lambda: (1,)
    )
    refuse(half, "are bfloat16, and this pipeline computes in float32: set pipeline.dtype")
    check_dataset(
        store, SimpleNamespace(latent_shape=lambda: SHAPE, dtype=torch.bfloat16),
        pipeline="tiny", family="sd3",
    )  # fmt: skip
    with pytest.raises(UserError, match="no scores of the reward 'new', only of a, b"):
        source(store, specs=[spec(), spec("new")])
    # A store with nothing to compare and too many processes are refused.
    with pytest.raises(UserError, match="rollout.prompts_per_iteration is 3"):
        source(store, process=Process(world_size=4))
    empty = write(tmp_path / "s", torch.full((GROUPS * SIZE, 2), math.nan))
    with pytest.raises(UserError, match="no group in .* has two images with a reward"):
        source(empty)

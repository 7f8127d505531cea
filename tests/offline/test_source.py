"""Stored rollouts: whole groups, a function of seed, iteration and store alone."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.offline.format import DatasetMetadata, append_shard, create_dataset, open_dataset
from flowrl.offline.source import StoredGroups, check_dataset, filter_groups
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import Timer
from flowrl.scoring.spec import RewardSpec
from flowrl.training.metrics import rollout_metrics
from flowrl.trajectory import Conditioning
from flowrl.utils.distributed import Runtime

SHAPE = (2, 2, 2)
GROUPS, SIZE, SHARD = 7, 6, 2


class Backbone:
    """Text becomes its length; nothing else is asked of it."""

    pipeline = None
    dtype, device = torch.float32, torch.device("cpu")

    def encode(self, prompts, negatives):
        return Conditioning(tensors={"length": torch.tensor([len(p) for p in prompts])})

    def latent_shape(self):
        return SHAPE

    def image_size(self):
        return 16, 24


@dataclass
class Process:
    """One of several, as far as sharing goes."""

    world_size: int = 1
    rank: int = 0
    local_rows = Runtime.local_rows


def reward(images, prompts, metadata):
    raise AssertionError("a stored image is not judged again")


def spec(name="a", **options):
    return RewardSpec(name=name, reward=reward, **options)


class OnlyRound:
    def applies(self, prompt, metadata):
        return metadata["kind"] == "round"

    __call__ = staticmethod(reward)


def write(folder, scores, *, first=0.0, names=("a", "b")):
    """Groups of SIZE, SHARD of them in a shard; latent i is filled with `first` + i."""
    create_dataset(
        folder,
        DatasetMetadata(
            pipeline="models/tiny",
            backbone="sd3",
            latent_shape=list(SHAPE),
            dtype="float32",
            sigmas=torch.linspace(1, 0, 6).sqrt().tolist(),
            rewards=[{"name": n, "version": None, "weight": 1.0} for n in names],
            recipe={},
        ),
    )
    for shard, start in enumerate(range(0, GROUPS, SHARD)):
        numbers = range(start * SIZE, min(start + SHARD, GROUPS) * SIZE)
        x0 = first + torch.tensor([*numbers]).float().view(-1, 1, 1, 1).expand(-1, *SHAPE)
        groups = [i // SIZE for i in numbers]
        append_shard(folder, shard, x0, scores[[*numbers]], [record(g) for g in groups], groups)
    return open_dataset(folder)


def record(group):
    kind = "round" if group % 2 else "square"
    return PromptRecord(uid=f"u{group}", text="x" * (group + 1), metadata={"kind": kind})


def plain_scores():
    number = torch.arange(GROUPS * SIZE).float()
    return torch.stack([number / 100, -number], 1)


def source(
    store, *, process=None, specs=None, prompts=3, group_size=4, seed=0, balance=None, weights=None
):
    backbone, specs = Backbone(), specs or [spec()]
    groups = filter_groups(store, specs, prompts, seed, balance=balance, weights=weights)
    return StoredGroups(
        sampler=groups,
        backbone=backbone,
        text_cache=TextCache(backbone),
        specs=specs,
        runtime=process or Process(),
        group_size=group_size,
        seed=seed,
    )


def read(groups, iteration):
    return groups.collect(iteration, Timer())


def numbers(rollout):
    """Of the images in the store, as their latents tell."""
    return rollout.tree.leaves()[:, 0, 0, 0].long()


@pytest.fixture
def store(tmp_path):
    """A store whose latents tell their numbers."""
    return write(tmp_path / "store", plain_scores())


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
    # A tree is a clean root with nothing to learn from on its way, and measured without images.
    rollout = read(source(store), 0)
    tree, metrics = rollout.tree, rollout_metrics(rollout, Runtime(device="cpu"))
    assert tree.sigmas[tree.step].tolist() == [0.0] and not len(tree.edge)
    assert torch.equal(tree.sigmas, torch.linspace(1, 0, 6).sqrt())
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


def test_stores_that_do_not_fit_are_refused(store, tmp_path):
    # A store that does not fit is refused with the reason.
    check_dataset(store, Backbone(), pipeline="elsewhere/tiny", family="sd3")
    half = SimpleNamespace(metadata=replace(store.metadata, dtype="bfloat16"), folder=store.folder)
    other = SimpleNamespace(latent_shape=lambda: (1,), dtype=torch.float32)
    for kept, backbone, pipeline, family, named in (
        (store, Backbone(), "models/sd3", "sd3", "pipeline.path 'models/tiny'"),
        (store, Backbone(), "here/tiny/", "flux", "pipeline.path 'sd3'.* 'flux'"),
        (store, other, "here/tiny/", "sd3", r"shape \[2, 2, 2\].* \[1\]"),
        (half, Backbone(), "here/tiny/", "sd3", "bfloat16.* float32: set pipeline.dtype"),
    ):
        with pytest.raises(UserError, match=named):
            check_dataset(kept, backbone, pipeline=pipeline, family=family)
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

"""What a store can teach under a recipe, and why one is refused."""

import functools
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
from flowrl.scoring.combine import affine, rank
from flowrl.scoring.spec import RewardSpec


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


def test_the_recipes_transforms_stand_ins_and_prompts_hold_for_stored_scores(tmp_path):
    scores = plain_scores()
    scores[3, 1] = math.nan
    store = write(tmp_path / "s", scores)
    half = functools.partial(affine, scale=0.5)
    specs = [spec("a", transform=half), spec("b", on_failure=-2.0, applies_to={"kind": ["square"]})]
    rollout = read(source(store, specs=specs, group_size=SIZE, prompts=GROUPS), 0)
    images, square = numbers(rollout), numbers(rollout) // SIZE % 2 == 0
    torch.testing.assert_close(rollout.scores, scores[images], equal_nan=True)
    assert bool(rollout.valid.all()) and torch.equal(rollout.applicable[:, 1], square)
    assert bool(rollout.applicable[:, 0].all())
    filled = torch.where(images == 3, -2.0, scores[images, 1])
    expected = torch.stack([scores[images, 0] / 2, torch.where(square, filled, math.nan)], 1)
    torch.testing.assert_close(rollout.terms, expected, equal_nan=True)
    total = torch.where(square, expected.sum(1), 2 * expected[:, 0])
    torch.testing.assert_close(rollout.reward, total)


def test_ranks_of_stored_images_are_among_all_of_their_group(tmp_path):
    store = write(tmp_path / "s", plain_scores())
    rollout = read(source(store, specs=[spec("a", transform=rank)], group_size=2), 0)
    torch.testing.assert_close(rollout.reward, numbers(rollout) % SIZE / (SIZE - 1))


def refuse(store, sentence, *, specs=None, pipeline="here/tiny/", family="sd3", **backbone):
    given = Backbone()
    for name, value in backbone.items():
        setattr(given, name, value)
    with pytest.raises(UserError, match=sentence):
        check_dataset(store, given, specs or [spec()], pipeline=pipeline, family=family)


def test_stores_that_do_not_fit_are_refused(store, tmp_path):
    # A store that does not fit is refused with the reason.
    check_dataset(store, Backbone(), [spec()], pipeline="elsewhere/tiny", family="sd3")
    half = SimpleNamespace(metadata=replace(store.metadata, dtype="bfloat16"), folder=store.folder)
    refuse(store, "made with pipeline.path 'models/tiny', and this recipe", pipeline="models/sd3")
    refuse(store, "made with pipeline.backbone 'sd3', and this recipe has 'flux'", family="flux")
    refuse(
        store, r"have shape \[2, 2, 2\], and this pipeline makes \[1\]", latent_shape=lambda: (1,)
    )
    refuse(half, "are bfloat16, and this pipeline computes in float32: set pipeline.dtype")
    check_dataset(
        store, SimpleNamespace(latent_shape=lambda: SHAPE, dtype=torch.bfloat16), [spec()],
        pipeline="tiny", family="sd3",
    )  # fmt: skip
    refuse(store, "no scores of the reward 'new', only of a, b", specs=[spec(), spec("new")])
    # A store with nothing to compare and too many processes are refused.
    with pytest.raises(
        UserError, match="rollout.prompts_per_iteration is 3, but 4 processes take whole groups"
    ):
        source(store, process=Process(world_size=4))
    empty = write(tmp_path / "s", torch.full((GROUPS * SIZE, 2), math.nan))
    with pytest.raises(UserError, match="no group in .* has two images with a reward"):
        source(empty)

"""Collecting: what is drawn is what is stored, interrupted or not."""

import math
from pathlib import Path

import pytest
import torch
from policies import disturb

from flowrl.api import collect, with_lora
from flowrl.backbones.lora_files import save_lora
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset, shard_file
from flowrl.sampling.rollout import Timer

ROLLOUT = {"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 2}
SPECS = [{"name": "brightness"}, {"name": "compressibility", "held_out": True}]


@pytest.fixture(scope="module")
def config(tiny_config):
    return tiny_config(rollout=ROLLOUT, rewards=SPECS)


@pytest.fixture(scope="module")
def collected(config, load_tiny, tmp_path_factory):
    """A store of three iterations, and the table that was shown."""
    folder = tmp_path_factory.mktemp("collected") / "store"
    return folder, collect(config, folder, groups=5, pipeline=load_tiny())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_store_holds_what_the_sampler_draws_bit_for_bit(collected, make_learner):
    store = open_dataset(collected[0])
    sampler = make_learner(rollout=ROLLOUT, specs=SPECS).source
    for iteration in range(3):
        rollout = sampler.collect(iteration, Timer())
        rows = torch.arange(8) + 8 * iteration
        assert torch.equal(store.latents(rows), rollout.tree.leaves())
        # A collection asks the held-out reward, too; a rollout of training does not.
        assert torch.equal(store.scores[rows, :1], rollout.scores)
        assert bool(store.scores[rows, 1].isfinite().all())
        assert [g.record for g in store.groups[2 * iteration :][:2]] == sampler.prompts.at(
            iteration
        )
    assert torch.equal(torch.tensor(store.metadata.sigmas), sampler.generator.schedule().sigmas)


def test_a_collection_that_was_killed_goes_on_to_the_same_store(
    collected, config, load_tiny, tmp_path
):
    folder = tmp_path / "store"
    collect(config, folder, groups=3, pipeline=load_tiny())
    shard_file(folder, 1).unlink()
    half = folder / "shards" / ".000002.safetensors.abcd1234.tmp"
    half.write_text("half")
    collect(config, folder, groups=5, pipeline=load_tiny())
    assert not half.exists()
    assert files(folder) == files(collected[0])


def test_a_full_store_and_that_of_another_recipe_are_kept(
    collected, config, load_tiny, tiny_config
):
    before = files(collected[0])
    assert collect(config, collected[0], groups=6, pipeline=load_tiny()) == collected[1]
    assert files(collected[0]) == before
    other = tiny_config(
        rollout=ROLLOUT | {"num_inference_steps": 3}, rewards=[{"name": "brightness"}]
    )
    with pytest.raises(UserError, match="was collected with .*, and this recipe has"):
        collect(other, collected[0], groups=8, pipeline=load_tiny())


def test_a_lora_draws_other_images_and_is_named(
    collected, config, make_learner, load_tiny, tmp_path
):
    learner = make_learner(rollout=ROLLOUT)
    disturb(learner.policy)
    save_lora(learner.policy.backbone.pipeline, tmp_path / "run", adapter="default")
    own = with_lora(config, str(tmp_path / "run")).lora
    assert (own.rank, own.alpha, own.init_from) == (4, 6, str(tmp_path / "run"))
    lora = str(tmp_path / "run")
    collect(config, tmp_path / "s", groups=1, lora=lora, pipeline=load_tiny())
    store, base = open_dataset(tmp_path / "s"), open_dataset(collected[0])
    assert store.metadata.lora and store.metadata.lora["path"] == str(tmp_path / "run")
    rows = torch.arange(8)
    assert not torch.allclose(store.latents(rows), base.latents(rows), atol=1e-3)
    expected = learner.source.collect(0, Timer()).tree.leaves()
    torch.testing.assert_close(store.latents(rows), expected, rtol=0, atol=1e-4)


# --- training on it ------------------------------------------------------------------------------


def test_an_iteration_can_learn_from_stored_groups_as_from_drawn_ones(collected, make_learner):
    """All images of one prompt: the objective sees the latents, rewards and words it would have
    seen when they were drawn."""
    store = open_dataset(collected[0])
    stored = {"prompts_per_iteration": 1, "tree": {"kind": "ode"}, "store": str(collected[0])}
    learner = make_learner(
        rollout=ROLLOUT | stored, objective={"kind": "gdro"},
        pipeline={"path": store.metadata.pipeline},
    )  # fmt: skip
    rollout = learner.source.collect(0, Timer())
    batch = learner.objective.prepare(rollout)
    (group,) = (g for g in store.groups if g.record.text == rollout.prompts[0])
    rows = torch.tensor(group.images)
    assert torch.equal(batch.x0.sort(0).values, store.latents(rows).sort(0).values)
    assert torch.equal(batch.reward.sort().values, store.scores[rows, 0].sort().values)
    before = [p.detach().clone() for p in learner.policy.parameters()]
    _, metrics = learner.iterate(0)
    assert math.isfinite(metrics["loss"]) and metrics["grad/norm"] > 0
    assert not all(map(torch.equal, learner.policy.parameters(), before))

"""A recipe with a store: training reads it, draws it anew when asked, and keeps the reference."""

import functools
from dataclasses import replace

import pytest
import torch

from flowrl.assembly.offline import STORES, build_stored, dataset_metadata
from flowrl.assembly.rollout import plan_at
from flowrl.config.rollout import StoreOptions
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.offline.writer import write_groups
from flowrl.sampling.rollout import Timer

ROLLOUT = {"prompts_per_iteration": 2, "num_inference_steps": 2, "tree": {"kind": "ode"}}
OBJECTIVE = {"kind": "gdro"}


@pytest.fixture(scope="module")
def stored(make_learner, tiny_config, tmp_path_factory):
    sampler = make_learner(rollout=ROLLOUT | {"group_size": 4}, objective=OBJECTIVE).source
    config = tiny_config(rollout=ROLLOUT | {"group_size": 4}, objective=OBJECTIVE)
    return write_groups(
        tmp_path_factory.mktemp("stored"), dataset_metadata(config, sampler), sampler, shards=2
    )


@pytest.fixture
def prepare(make_learner, tiny_config, stored, tmp_path):

    def make(specs=None, size=2, **options):
        run = {"output_dir": str(tmp_path)}
        changes = {"rollout": ROLLOUT | {"group_size": size}, "objective": OBJECTIVE, "run": run}
        learner = make_learner(**changes | ({"specs": specs} if specs else {}))
        config = tiny_config(**changes | ({"rewards": specs} if specs else {}))
        section = StoreOptions(path=str(stored.folder), **options)
        rollout = config.rollout.model_copy(update={"store": section})
        config = config.model_copy(update={"rollout": rollout})
        sampler = learner.source

        def redraw(other):
            plan = functools.partial(plan_at, other.rollout.plan, other.run.seed)
            return replace(sampler, plan=plan)

        backbone = learner.policy.backbone
        text_cache = sampler.generator.text_cache
        return replace(learner, source=build_stored(config, sampler, backbone, redraw, text_cache))

    return make


def test_training_reads_the_store_and_moves_the_policy(prepare, stored):
    learner = prepare()
    rollout, metrics = learner.iterate(0)
    known = stored.latents(torch.arange(len(stored))).flatten(1)
    assert all(any(torch.equal(x, k) for k in known) for x in rollout.tree.leaves().flatten(1))
    assert len(rollout.tree) == 4 and metrics["grad/norm"] > 0


def test_a_refreshed_store_has_the_images_of_the_policy_in_groups_of_the_same_size(
    prepare, stored, tmp_path
):
    learner = prepare(refresh_every=2)
    for iteration in range(2):
        learner.iterate(iteration)
    assert not (tmp_path / STORES).exists()
    learner.source.collect(2, Timer())
    store = open_dataset(tmp_path / STORES / "step-000002")
    assert [len(g.images) for g in store.groups] == [4] * len(stored.groups)
    assert store.metadata.lora == {"iteration": 2}
    assert store.metadata.recipe["rollout"] == stored.metadata.recipe["rollout"]


def test_a_reward_that_was_not_scored_is_refused_before_training(prepare):
    with pytest.raises(UserError, match="has no scores of the reward 'compressibility'"):
        prepare(specs=[{"name": "compressibility"}])

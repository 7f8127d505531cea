"""A recipe with a store: training reads it, draws it anew when asked, and keeps the reference."""

import pytest
import torch

from flowrl.assembly.offline import dataset_metadata
from flowrl.offline.writer import write_groups

OBJECTIVE = {"kind": "gdro"}


ROLLOUT = {"prompts_per_iteration": 2, "num_inference_steps": 2, "tree": {"kind": "ode"}}


@pytest.fixture(scope="module")
def stored(make_learner, tiny_config, tmp_path_factory):
    sampler = make_learner(rollout=ROLLOUT | {"group_size": 4}, objective=OBJECTIVE).source
    config = tiny_config(rollout=ROLLOUT | {"group_size": 4}, objective=OBJECTIVE)
    return write_groups(
        tmp_path_factory.mktemp("stored"), dataset_metadata(config, sampler), sampler, shards=2
    )


@pytest.fixture
def prepare(make_learner, stored):
    def make(specs=None, size=2, objective=OBJECTIVE):
        rollout = ROLLOUT | {"group_size": size, "store": str(stored.folder)}
        return make_learner(rollout=rollout, objective=objective, specs=specs)

    return make


def test_training_reads_the_store_and_moves_the_policy(prepare, stored):
    learner = prepare()
    rollout, metrics = learner.iterate(0)
    known = stored.latents(torch.arange(len(stored))).flatten(1)
    assert all(any(torch.equal(x, k) for k in known) for x in rollout.tree.leaves().flatten(1))
    assert len(rollout.tree) == 4 and metrics["grad/norm"] > 0

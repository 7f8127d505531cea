import re

import pytest
import torch

from flowrl.assembly import rollout as build_rollout
from flowrl.errors import UserError
from flowrl.trees.memory import check_memory, free_bytes, rollout_bytes
from flowrl.trees.plan import Step, TreePlan

NOISY = Step(noise=True, train=True)
TREE = TreePlan(1, (Step(branch=4, noise=True, train=True), NOISY, NOISY, Step()))
LATENT, HALF = 16 * 128 * 128, 2  # SD3.5 at 1024 pixels in 16 bits


def test_rollouts_are_refused_beyond_the_free_memory():
    # Bytes are those of nodes edges and the widest step.
    nodes, edges, parents, widest = 17, 12, 9, 4
    expected = 2 * 2 * nodes + (2 + 4 + 4) * edges + 2 * parents + 5 * 4 * widest
    assert rollout_bytes(TREE, 1, 1, HALF) == expected
    assert rollout_bytes(TREE, 3, LATENT, HALF) == 3 * LATENT * expected
    # The prompts that are recommended fit and one more does not.
    free = 10 * rollout_bytes(TREE, 1, LATENT, HALF) - 1
    with pytest.raises(
        UserError, match="204 latents and 144 trained edges, with up to 48"
    ) as error:
        check_memory(TREE, 12, LATENT, HALF, free)
    fitting = int(re.findall(r"fits is (\d+)", str(error.value))[0])
    check_memory(TREE, fitting, LATENT, HALF, free)
    with pytest.raises(UserError):
        check_memory(TREE, fitting + 1, LATENT, HALF, free)
    # When not one prompt fits it says so.
    with pytest.raises(UserError, match="not even one prompt fits: lower rollout.group_size"):
        check_memory(TREE, 2, LATENT, HALF, 1000)
    # Where nobody can tell nothing is refused.
    check_memory(TREE, 10**9, LATENT, HALF, None)
    assert free_bytes(torch.device("meta")) is None
    assert free_bytes(torch.device("cpu")) > 2**20


def test_a_learner_is_not_built_around_a_rollout_that_does_not_fit(make_learner, monkeypatch):
    monkeypatch.setattr(build_rollout, "free_bytes", lambda device: 100_000)
    with pytest.raises(UserError, match="GiB are free: not even one prompt fits"):
        make_learner()

"""What makes the host wait for a GPU, counted on a pretended one: see `pretended_device`."""

import pytest
from pretended_device import DEVICE, Waits, mark
from torch import nn

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.utils.distributed import Runtime

GRPO = {"objective": {"kind": "grpo", "kl_coef": 0.01}, "rollout": {"tree": {"kind": "flow_grpo"}}}
NFT = {"objective": {"kind": "nft"}, "rollout": {"tree": {"kind": "ode"}}}
TREE = {
    "objective": {"kind": "grpo", "kl_coef": 0.0},
    "rollout": {"tree": {"kind": "branch_grpo", "branch": 2, "splits": [0, 2]}},
}
EXPLORE = {"candidates": 8, "precision": "bf16", "num_inference_steps": 3, "audit": {"every": 0}}
TWO_STAGES = {
    "objective": {"kind": "nft"},
    "rollout": {"tree": {"kind": "ode"}, "explore": EXPLORE},
}
PREVIEWS = {"candidates": 8, "precision": "bf16", "num_inference_steps": None, "stop_at": 2}
PRUNED = {
    "objective": {"kind": "grpo", "kl_coef": 0.0},
    "rollout": {"tree": {"kind": "flow_grpo"}, "explore": PREVIEWS | {"audit": {"every": 0}}},
}
KINDS = {
    "grpo": GRPO,
    "nft": pytest.param(NFT, marks=pytest.mark.slow),
    "tree": pytest.param(TREE, marks=pytest.mark.slow),
    "two stages": pytest.param(TWO_STAGES, marks=pytest.mark.slow),
    "pruned": pytest.param(PRUNED, marks=pytest.mark.slow),
}

MOST_OF_AN_ITERATION, MOST_OF_A_MICRO_BATCH = 20, 4
ROWS = 8  # of a small micro-batch


@pytest.fixture
def count(tiny_config, load_tiny):
    """Return the waits of an iteration after a first one, by line of flowrl."""

    def counted(kind, *, steps=4, prompts=2, micro_batch=64):
        rollout = {"num_inference_steps": steps, "prompts_per_iteration": prompts}
        config = tiny_config(
            objective=kind["objective"], rollout=rollout | {"batch_size": 64} | kind["rollout"],
            optim={"micro_batch": micro_batch, "updates_per_rollout": 1},
        )  # fmt: skip
        pipeline, runtime = load_tiny(), Runtime(device="cpu")
        runtime.device = DEVICE
        for part in vars(pipeline).values():
            if isinstance(part, nn.Module):
                mark(*part.parameters(), *part.buffers())
        with Waits():
            learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline))
        network = learner.policy.network
        mark(*network.parameters(), *network.buffers())
        with Waits():
            learner.iterate(0)  # encodes what later ones have
        with Waits() as waits:
            learner.iterate(1)
        return waits.lines

    return counted


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_step_and_no_row_waits_and_few_micro_batches_and_iterations_do(count, kind):
    plain, steps, cut = count(kind), count(kind, steps=6), count(kind, micro_batch=ROWS)
    more = count(kind, prompts=4)
    assert 0 < plain.total() <= MOST_OF_AN_ITERATION, plain
    assert steps.total() == plain.total(), steps - plain
    # Twice the images, which are scored and decoded as before: no line waits for each.
    assert max((more - plain).values(), default=0) <= 1, more - plain
    # One micro-batch more at least.
    assert cut.total() - plain.total() <= MOST_OF_A_MICRO_BATCH, cut - plain

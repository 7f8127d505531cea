"""Every call of a network has one shape, in a rollout, in learning from it and in an evaluation."""

import math

import pytest
import torch

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.functional.batches import ALONE, Batches
from flowrl.objectives import base
from flowrl.trajectory import Conditioning

CHAINS = {"prompts_per_iteration": 2, "group_size": 5, "num_inference_steps": 3, "batch_size": 6}


@pytest.fixture
def rounding(monkeypatch):
    """A network whose last bits depend on how many rows it sees, as a GPU's do in 16 bits."""
    rows: list[int] = []
    velocity = PipelineBackbone.velocity

    def other(self, x, sigma, cond):
        rows.append(len(x))
        return velocity(self, x, sigma, cond) * (1 + 0.05 * math.sin(len(x)))

    monkeypatch.setattr(PipelineBackbone, "velocity", other)
    return rows


def middling(images, prompts, metadata):
    """Two images of a prompt have its mean reward, hence no advantage: their steps are dropped."""
    return [0.0, 0.5, 1.0, 0.5, 0.5][: len(images)] * (len(images) // 5)


@pytest.mark.parametrize("tree", [{"kind": "flow_grpo"}, {"kind": "branch_grpo", "splits": [0]}])
def test_the_ratio_is_1_though_a_partial_batch_rounds_otherwise(make_learner, rounding, tree):
    rollout = CHAINS | {"tree": tree} | ({"group_size": 4} if "splits" in tree else {})
    rewards = None if "splits" in tree else {"middling": middling}
    learner = make_learner(rollout=rollout, optim={"micro_batch": 6}, rewards=rewards)
    metrics = learner.iterate(0)[1]
    assert metrics["policy/ratio_error_max"] < 1e-3 and metrics["grad/norm"] > 0
    assert len(set(rounding)) == 1
    rounding.clear()
    metrics = learner.iterate(1)[1]  # what is logged has the rows that are made up
    assert metrics["forwards/rollout"] + metrics["forwards/learn"] == sum(rounding)


def test_an_evaluation_makes_calls_of_one_shape(make_learner, rounding, tiny_config, load_tiny):
    from flowrl.assembly.learner import ProvidedObjects, build_evaluator, build_rewards
    from flowrl.utils.distributed import Runtime

    config = tiny_config(
        evaluation={"prompts": "tiny:colors:test", "num_images": 5, "batch_size": 3,
                    "num_inference_steps": 2}
    )  # fmt: skip
    evaluator = build_evaluator(config, load_tiny(), build_rewards(config), ProvidedObjects())
    assert evaluator is not None
    found = evaluator(evaluator.backbone.velocity, Runtime(device="cpu"))
    assert rounding == [3] * 4 and found.scores.isfinite().all() and len(found.images) == 5


def test_rows_that_are_made_up_have_no_part_in_the_gradient():
    weight = torch.tensor(2.0, requires_grad=True)
    seen: list[list[float]] = []

    def field(x, sigma, cond):
        seen.append(x.flatten().tolist())
        assert len(x) == len(sigma) == len(cond)
        return weight * x * sigma.view(-1, 1)

    x, sigma = torch.arange(1.0, 6.0).view(5, 1), torch.tensor(0.5)
    cond = Conditioning(tensors={"text": torch.zeros(5, 1)})
    spare = torch.ones(1, 1), cond.take(torch.tensor([0]))
    more = Batches(lambda n: n + 1)  # another process calls once more
    for batches, size in ((ALONE, 9), (ALONE, 3), (more, 3)):
        seen.clear()
        v = batches.velocity(field, size, 3, spare)(x, sigma, cond)
        torch.testing.assert_close(v, x)
        (gradient,) = torch.autograd.grad(v.sum(), weight)
        assert gradient == 7.5 and {len(row) for row in seen} == {3}
    # Without rows a process in lockstep calls the network all the same, and others do not.
    seen.clear()
    nothing = x[:0], sigma.expand(0), cond.take(torch.arange(0))
    assert len(ALONE.velocity(field, 3, 3, spare)(*nothing)) == 0 and not seen
    assert len(more.velocity(field, 3, 3, spare)(*nothing)) == 0 and len(seen) == 1


def test_a_process_without_rows_has_a_backward_pass_where_others_have_one():
    cond = Conditioning(tensors={"text": torch.zeros(1, 1)})
    inputs: list[torch.Tensor] = []

    def field(x, sigma, cond):
        inputs.append(x)
        return x

    x = torch.ones(2, 1, requires_grad=True)
    full = Batches(lambda n: n + 1).velocity(field, 3, 3, (torch.ones(1, 1), cond))
    moved = full((2 * x)[:0], torch.tensor(0.5).expand(0), cond.take(torch.arange(0)))
    assert inputs[0].requires_grad and (inputs[0] == 1).all() and moved.requires_grad
    full(x.detach()[:0], torch.tensor(0.5).expand(0), cond.take(torch.arange(0)))
    assert not inputs[1].requires_grad


def test_other_rewards_leave_every_objective_something_to_learn(make_learner):
    learner = make_learner(
        objective={"kind": "sft"}, rollout={"tree": {"kind": "ode"}},
        rewards={"same": lambda images, prompts, metadata: [0.5] * len(images)},
    )  # fmt: skip
    from flowrl.sampling.rollout import Timer

    rollout = learner.source.collect(0, Timer())
    assert len(learner.objective.prepare(rollout)) == 0
    assert len(learner.objective.prepare(base.with_random_rewards(rollout))) > 0

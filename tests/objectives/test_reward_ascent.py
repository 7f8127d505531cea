from dataclasses import replace

import pytest
import torch

from flowrl.config.objectives import DRaFTOptions, FlowBPBridgeOptions, SRPOOptions
from flowrl.objectives.base import Models
from flowrl.objectives.reward_backprop.decoder import RewardGradient
from flowrl.sampling.rollout import Timer

OBJECTIVES = {  # a renoised image; a chain with the pull to the reference
    "srpo": SRPOOptions(),
    "flowbp_bridge": FlowBPBridgeOptions(steps=3, kl_coef=1e-3),
}


class Cyan:
    name = "cyan"
    differentiable = True

    def __call__(self, images, prompts, metadata):
        return 1 - images[:, 0].flatten(1).mean(1)


@pytest.fixture(scope="module")
def ascend(make_learner):
    def make(objective, **changes):
        learner = make_learner(
            rewards={"cyan": Cyan()},
            objective={"kind": "rwr"},
            rollout={
                "tree": {"kind": "ode"},
                "prompts_per_iteration": 2,
                "group_size": 2,
                "num_inference_steps": 4,
            },
            **changes,
        )
        reward = RewardGradient(learner.policy.backbone, learner.specs, 4)
        return replace(learner, objective=objective, reward_gradient=reward)

    return make


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_few_steps_raise_the_reward_of_the_same_prompts(ascend, name):
    learner = ascend(OBJECTIVES[name].build(), optim={"lr": 5e-3, "micro_batch": 3})
    rewards = []
    for _ in range(2):  # the same prompts and noise each time
        rollout, metrics = learner.iterate(0)
        rewards.append(rollout.reward.mean().item())
        assert metrics["path/dropped"] == 0 and metrics["grad/norm"] > 0
    rewards.append(learner.source.collect(0, Timer()).reward.mean().item())
    assert rewards[2] > rewards[1] > rewards[0]
    assert all(p.grad is None for p in learner.policy.backbone.pipeline.vae.parameters())


def test_draft_through_all_steps_is_the_gradient_of_the_images_reward(ascend):
    learner = ascend(DRaFTOptions(steps=4).build(), optim={"micro_batch": 16})
    parameters = learner.policy.parameters()
    generator = torch.Generator().manual_seed(0)
    for p in parameters:  # away from the fresh adapter, whose first factor has no gradient
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    before = [p.detach().clone() for p in parameters]

    def drawn(along, step):
        for p, start, towards in zip(parameters, before, along, strict=True):
            p.data = start + step * towards
        return learner.source.collect(0, Timer())

    still = [torch.zeros_like(p) for p in parameters]
    rollout = drawn(still, 0)
    models = Models(
        policy=learner.policy.velocity, reward_gradient=learner.reward_gradient(rollout)
    )
    loss, _ = learner.objective.loss(models, learner.objective.prepare(rollout))
    slope = torch.autograd.grad(loss, parameters)
    norm = torch.stack([g.square().sum() for g in slope]).sum().sqrt()
    along = [g / norm for g in slope]
    step = 5e-3  # smaller ones are lost in the rounding of fp32
    up, down = (learner_reward(learner, drawn(along, s)) for s in (step, -step))
    assert ((up - down) / (2 * step)).item() == pytest.approx(-norm.item(), rel=0.01)


def learner_reward(learner, rollout):
    values, _ = learner.reward_gradient(rollout)(
        rollout.tree.leaves(), rollout.tree.prompt_of_leaves()
    )
    return values.mean()

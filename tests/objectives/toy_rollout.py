"""A rollout of given trees and rewards; what objectives do not read is left empty."""

import torch

from flowrl.functional.sde import KERNELS
from flowrl.sampling.sampler import NodeVelocity, Schedule, sample_tree
from flowrl.trajectory import Rollout, Tree
from flowrl.trees.plan import TreePlan


def sampled(velocity: NodeVelocity, plan: TreePlan, prompts: int, dtype=torch.float32) -> Tree:
    """Trees of latents (3,), with noise of one seed."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.arange(prompts).repeat_interleave(plan.roots)

    def noise(*_):
        return torch.randn(len(prompt), 3, generator=generator)

    sigmas = torch.linspace(1, 0, len(plan.steps) + 1)
    schedule = Schedule(sigmas=sigmas, kernel=KERNELS["flow_sde"], noise_level=0.5)
    return sample_tree(velocity, noise().to(dtype), prompt, plan, schedule, noise)


def rollout_of(tree, reward, cond, *, prompts=("a", "b"), scores=None, seed: int = 0) -> Rollout:
    scores = reward[:, None] if scores is None else scores
    return Rollout(
        tree=tree, cond=cond, prompts=prompts, metadata=({},) * len(prompts),
        images=torch.zeros(len(reward), 3, 1, 1), trees=torch.arange(len(tree)), scores=scores,
        applicable=torch.ones_like(scores, dtype=torch.bool), names=("r",),
        weights=torch.ones(scores.shape[1]), reward=reward, valid=reward.isfinite(),
        group=tree.prompt.repeat_interleave(len(tree.leaf)), log_prob=tree.log_prob, seed=seed,
    )  # fmt: skip

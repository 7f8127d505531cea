"""A rollout of given trees and rewards; what objectives do not read is left empty."""

import torch

from flowrl.trajectory import Rollout


def rollout_of(tree, reward, cond, *, prompts=("a", "b"), scores=None, seed: int = 0) -> Rollout:
    scores = reward[:, None] if scores is None else scores
    return Rollout(
        tree=tree, cond=cond, prompts=prompts, metadata=({},) * len(prompts),
        images=torch.zeros(len(reward), 3, 1, 1), trees=torch.arange(len(tree)), scores=scores,
        applicable=torch.ones_like(scores, dtype=torch.bool), names=("r",),
        weights=torch.ones(scores.shape[1]), reward=reward, valid=reward.isfinite(),
        group=tree.prompt.repeat_interleave(len(tree.leaf)), log_prob=tree.log_prob, seed=seed,
    )  # fmt: skip

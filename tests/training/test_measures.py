"""What is logged of a rollout's rewards."""

import math
from dataclasses import replace

import pytest
import torch
from toy_rollout import rollout_of

from flowrl.offline.source import single_node_trees
from flowrl.scoring.combine import combine, train_weights
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.training.metrics import rollout_metrics
from flowrl.trajectory import Conditioning, Rollout
from flowrl.utils.distributed import Runtime

nan = math.nan


def rollout(specs, scores, applicable) -> Rollout:
    scores, fits = torch.tensor(scores), torch.tensor(applicable)
    names = tuple(spec.name for spec in specs)
    found = RewardResult(scores=scores, valid=scores.isfinite(), applicable=fits, names=names)
    reward, valid = combine(specs, found)
    count, group = len(scores), torch.zeros(len(scores)).long()
    tree = single_node_trees(torch.zeros(count, 2, 2, 2), group, torch.tensor([1.0, 0.0]))
    cond = Conditioning(tensors={"a": torch.zeros(1, 1)})
    made = rollout_of(tree, reward, cond, prompts=("p",), scores=scores)
    weights = torch.tensor(train_weights(specs))
    return replace(made, applicable=fits, names=names, weights=weights, valid=valid)


def test_missing_scores_are_counted_and_never_averaged():
    def never(images, prompts, metadata):
        raise AssertionError

    specs = [
        RewardSpec(name="a", reward=never),
        RewardSpec(name="b", reward=never),
        RewardSpec(name="watched", reward=never, held_out=True),
    ]
    scores = [[2.0, 1.0, nan], [nan, 1.0, nan], [4.0, nan, nan], [nan, 3.0, 1.0]]
    fits = [[True, True, True], [True, True, True], [True, True, False], [False, True, True]]
    metrics = rollout_metrics(rollout(specs, scores, fits), Runtime(device="cpu"))
    assert metrics["reward/a"] == 3.0 and metrics["reward/missing/a"] == pytest.approx(1 / 3)
    assert metrics["reward/missing/b"] == 1 / 4 and metrics["reward/invalid"] == 2 / 4
    assert metrics["reward/missing/watched"] == pytest.approx(2 / 3)
    assert metrics["reward/mean"] == pytest.approx((3.0 + 6.0) / 2)

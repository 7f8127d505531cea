"""The loop: its first ratio is 1, its gradient does not depend on how it is cut, it learns."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policies import disturb

from flowrl.backbones.policy import OLD, POLICY
from flowrl.errors import UserError
from flowrl.sampling.rollout import Timer
from flowrl.scoring import combine
from flowrl.scoring.executors.base import RewardFailure
from flowrl.training.metrics import RowMeans, over_processes, rollout_metrics


def warm(learner):
    """Away from the fresh adapter, whose second factor is 0."""
    disturb(learner.policy, 0.02)
    return learner


def first_gradient(learner) -> torch.Tensor:
    """Of the first iteration's first update, before clipping."""
    found: list[torch.Tensor] = []
    learner.runtime.clip_gradients = _recorder(found)
    learner.iterate(0)
    return found[0]


def _recorder(found: list[torch.Tensor]):
    def record(parameters, max_norm):
        found.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        return 0.0

    return record


def test_the_first_log_ratio_is_exactly_0_at_equal_batch_shapes(make_learner):
    for kernel, guidance in [("flow_sde", 3.0), ("dance_sde", 1.0), ("cps", 1.0)]:
        options = {"merge_lora": False, "kernel": kernel, "guidance_scale": guidance}
        learner = warm(make_learner(rollout=options))
        _, metrics = learner.iterate(0)
        assert metrics["policy/ratio_error_max"] == 0
        assert metrics["policy/ratio_mean"] == 1
        assert metrics["groups/no_signal"] == 0  # otherwise shapes would not be equal


def test_the_old_policy_follows_by_the_share_of_the_next_iteration(make_learner):
    share = {"rate": 0.2, "limit": 0.6}  # 0.0 at iteration 0, 0.2 at 1, 0.4 at 2
    objective = {"kind": "nft", "noising": {"count": 2}, "old_decay": share}
    learner = warm(make_learner(rollout={"tree": {"kind": "ode"}}, objective=objective))

    def adapter(name: str) -> torch.Tensor:
        return torch.cat([t.double().flatten() for t in learner.policy.weights(name)])

    before = adapter(OLD).clone()
    for iteration, kept in enumerate((0.2, 0.4)):
        learner.iterate(iteration)
        expected = kept * before + (1 - kept) * adapter(POLICY)
        torch.testing.assert_close(adapter(OLD), expected, rtol=1e-5, atol=1e-7)
        assert (adapter(POLICY) - before).abs().max() > 1e-4
        before = adapter(OLD).clone()


def test_folded_or_in_half_precision_the_first_ratio_stays_1(make_learner):
    # Merged into the weights it is 1 to float tolerance, beside them exactly, also in batches
    # smaller than a rollout.
    for options in ({"merge_lora": True}, {"merge_lora": False, "batch_size": 3}):
        _, metrics = warm(make_learner(rollout=options)).iterate(0)
        assert metrics["policy/ratio_error_max"] < 0.1  # nats
        assert (metrics["policy/ratio_error_max"] == 0) == (not options["merge_lora"])
    # Networks in half precision give exact first ratios too. The precision of accelerate is a
    # process's; autocast alone is what bf16 adds to it.
    learner = warm(make_learner(pipeline={"dtype": "bf16"}))
    learner.runtime.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    rollout, metrics = learner.iterate(0)
    assert rollout.tree.x.dtype == torch.bfloat16
    assert rollout.images.dtype == rollout.tree.mean_old.dtype == torch.float32
    assert metrics["policy/ratio_error_max"] == 0
    assert metrics["grad/norm"] > 0
    assert {p.dtype for p in learner.policy.parameters()} == {torch.float32}


def test_training_stops_and_explains_when_the_velocities_differ(make_learner):
    learner = warm(make_learner())
    before = [p.clone() for p in learner.policy.parameters()]
    rollout = learner.source.collect(0, Timer())
    velocity = learner.policy.backbone.velocity
    learner.policy.backbone.velocity = lambda *inputs: velocity(*inputs) * 1.05
    with pytest.raises(UserError, match="optim.micro_batch"):
        learner.learn(rollout, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_the_gradient_does_not_depend_on_the_micro_batch(make_learner):
    gradients = []
    for size in (8, 4):
        optim = {"lr": 1e-2, "micro_batch": size}
        learner = warm(make_learner(optim=optim, objective={"kl_coef": 0.1}))
        gradients.append(first_gradient(learner))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6 * float(gradients[0].abs().max()))
    assert gradients[0].norm() > 0


def test_two_updates_split_the_gradient_of_one_by_groups(make_learner):
    """With equally large groups, the whole gradient is the mean of the groups' own."""
    whole = first_gradient(warm(make_learner()))
    learner = warm(make_learner(optim={"updates_per_rollout": 2, "lr": 1e-30, "micro_batch": 4}))
    learner.optimizer.param_groups[0]["weight_decay"] = 0.0
    parts = []
    learner.runtime.clip_gradients = _recorder(parts)
    learner.iterate(0)
    assert len(parts) == 2
    torch.testing.assert_close(
        (parts[0] + parts[1]) / 2, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max())
    )


def test_a_second_update_sees_a_ratio_that_has_moved(make_learner):
    learner = warm(
        make_learner(
            rollout={"merge_lora": False},
            optim={"updates_per_rollout": 2, "lr": 1e-2, "micro_batch": 4},
        )
    )
    _, metrics = learner.iterate(0)
    assert metrics["policy/ratio_error_max"] > 0.1  # and yet training went on


def test_missing_rewards_are_left_out_and_too_many_stop(make_learner, monkeypatch):
    def sometimes(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        scores[0] = math.nan
        return scores

    rewards = {"sometimes": sometimes}
    learner = make_learner(rewards=rewards)
    with monkeypatch.context() as patch:
        patch.setattr(combine, "MOST_INVALID", 0.2)
        _, metrics = learner.iterate(0)
    assert metrics["reward/invalid"] == 1 / 8
    assert all(math.isfinite(v) for v in metrics.values())
    assert all(p.isfinite().all() for p in learner.policy.parameters())
    with pytest.raises(RewardFailure, match="1 of 8"):
        make_learner(rewards=rewards).iterate(0)


def test_without_any_signal_nothing_moves(make_learner):
    learner = make_learner(rewards={"same": lambda images, *_: [0.5] * len(images)})
    before = [p.clone() for p in learner.policy.parameters()]
    _, metrics = learner.iterate(0)
    assert metrics["groups/no_signal"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_the_reward_rises(make_learner, tmp_path):
    """How bright the images of one prompt are, by more than they differ among themselves."""

    def brightness(images, prompts, metadata):
        return images.mean((1, 2, 3))

    (tmp_path / "prompts.txt").write_text("a photo of a circle\n")
    learner = make_learner(
        rewards={"brightness": brightness},
        prompts={"train": str(tmp_path / "prompts.txt")},
        rollout={
            "prompts_per_iteration": 1,
            "group_size": 12,
            "num_inference_steps": 3,
            "batch_size": 12,
        },
        optim={"lr": 6e-3, "micro_batch": 12},
        objective={"clip_nats": 1e9},
    )
    rollouts = [learner.iterate(iteration)[0] for iteration in range(12)]
    means = [rollout.reward.mean().item() for rollout in rollouts]
    gain = sum(means[-3:]) / 3 - sum(means[:3]) / 3
    assert gain > rollouts[0].reward.std(), means


def test_metrics_say_what_they_are_and_weigh_micro_batches_by_rows(make_learner):
    learner, nan = make_learner(rollout={"prompts_per_iteration": 1}), math.nan
    rollout = learner.source.collect(0, Timer())
    metrics = rollout_metrics(rollout, learner.runtime)
    x0 = rollout.tree.leaves()
    assert metrics["latent/norm"] == pytest.approx(x0.pow(2).mean().item() ** 0.5)
    assert metrics["reward/mean"] == pytest.approx(rollout.images.mean().item(), abs=2e-3)
    # Missing scores are counted and never averaged, nor are those of rewards that do not apply.
    scores = [[2.0, 1.0, nan], [nan, 1.0, nan], [4.0, nan, nan], [nan, 3.0, 1.0]]
    fits = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]]).bool()
    reward = torch.tensor([3.0, nan, nan, 6.0])
    some = replace(
        rollout, names=("a", "b", "held out"), weights=torch.tensor([1.0, 1.0, 0.0]),
        scores=torch.tensor(scores), applicable=fits, reward=reward, valid=reward.isfinite(),
    )  # fmt: skip
    metrics = rollout_metrics(some, learner.runtime)
    assert metrics["reward/a"] == 3.0 and metrics["reward/missing/a"] == pytest.approx(1 / 3)
    assert metrics["reward/missing/b"] == 1 / 4 and metrics["reward/invalid"] == 2 / 4
    assert metrics["reward/missing/held out"] == pytest.approx(2 / 3)
    assert metrics["reward/mean"] == pytest.approx((3.0 + 6.0) / 2)
    # Means weigh micro batches by rows and keep the largest maximum.
    means = RowMeans()
    means.add({"a": torch.tensor(1.0), "b_max": torch.tensor(3.0)}, 3)
    means.add({"a": torch.tensor(5.0), "b_max": torch.tensor(2.0)}, 1)
    assert means.result() == {"a": 2.0, "b_max": 3.0}


def test_metrics_of_processes_are_joined_by_rows_counts_and_maxima():
    other = {"loss": (4.0, 1), "tree/leaves": (3.0, 5), "a_max": (1.0, 9), "latent/norm": (4.0, 1)}
    text = json.dumps(other | {"policy/kl": (7.0, 2)})
    runtime: Any = SimpleNamespace(
        world_size=2, rank=0, merge=lambda texts: {"000001": text} | texts
    )
    own = {"loss": 1.0, "tree/leaves": 6.0, "a_max": 2.0, "latent/norm": 2.0}
    weights = {"loss": 3, "tree/leaves": 2, "a_max": 1, "latent/norm": 1}
    found = over_processes(own, weights, runtime)
    norm = pytest.approx(10**0.5)
    assert found == {
        "loss": 1.75, "tree/leaves": 9.0, "a_max": 2.0, "latent/norm": norm, "policy/kl": 7.0,
    }  # fmt: skip

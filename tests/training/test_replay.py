"""Learning again from earlier steps: the gradient, and what is kept."""

from types import SimpleNamespace

import pytest
import torch
from crashes import SMALLEST
from policies import disturb

from flowrl.sampling.rollout import Timer
from flowrl.training.checkpoint import read_checkpoint
from flowrl.training.replay import Replay
from flowrl.utils.distributed import Runtime

SMALL = SMALLEST | {"prompts_per_iteration": 2, "tree": {"kind": "flow_grpo"}}


@pytest.fixture
def learner_of(make_learner):
    def make(replay: int = 1, **optim):
        optim = {"replay": replay, "lr": 1e-2} | optim
        learner = make_learner(rollout=SMALL, objective={"kind": "grpo"}, optim=optim)
        disturb(learner.policy, 0.05)  # away from the fresh adapter, half of which has no gradient
        return learner

    return make


def gradient(learner, monkeypatch, rollout, iteration: int) -> torch.Tensor:
    """What an update's step would take, in place of taking it."""
    seen = []

    def step():
        seen.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters()]))

    with monkeypatch.context() as patch:
        patch.setattr(learner.optimizer, "step", step)
        learner.learn(rollout, iteration)
    return seen[0]


def test_at_one_policy_the_gradient_is_the_mean_over_all_steps(learner_of, monkeypatch):
    plain, learner = (learner_of(n, max_grad_norm=1e9) for n in (0, 1))
    rollouts = [learner.source.collect(i, Timer()) for i in range(3)]
    alone = [gradient(plain, monkeypatch, rollout, 0) for rollout in rollouts]
    rows = [len(learner.objective.prepare(rollout)) for rollout in rollouts]
    joined = [gradient(learner, monkeypatch, rollout, 0) for rollout in rollouts]
    assert torch.equal(joined[0], alone[0])
    for now, before in ((1, 0), (2, 1)):  # kept for one iteration
        mean = (rows[now] * alone[now] + rows[before] * alone[before]) / (rows[now] + rows[before])
        torch.testing.assert_close(joined[now], mean, rtol=1e-3, atol=1e-6 * mean.abs().max())
        assert (joined[now] - alone[now]).norm() > 0.1 * mean.norm()


def test_earlier_steps_have_the_ratio_to_the_policy_that_sampled_them(learner_of):
    learner = learner_of(2)
    metrics = [learner.iterate(iteration)[1] for iteration in range(4)]
    errors = [row["policy/ratio_error_max"] for row in metrics]
    assert errors[0] < 1e-3 and min(errors[1:]) > learner.ratio_tolerance
    rows = [row["tree/train_forwards"] for row in metrics]
    assert rows == [rows[0] * n for n in (1, 2, 3, 3)]


def test_groups_of_equal_rewards_are_not_kept(make_learner):
    dull = []  # prompts whose images are all worth the same

    def half_equal(images, prompts, metadata):
        scores = images.mean((1, 2, 3)).tolist()
        return [0.0 if p in dull else s for p, s in zip(prompts, scores, strict=True)]

    learner = make_learner(
        rewards={"bright": half_equal}, rollout=SMALL, optim={"replay": 3},
        objective={"kind": "grpo", "kl_coef": 0.1},
    )  # fmt: skip
    dull += [learner.source.prompts.at(iteration)[0].text for iteration in range(3)]
    rows = [learner.iterate(iteration)[1]["tree/train_forwards"] for iteration in range(3)]
    assert rows == [rows[0], rows[0] * 3 / 2, rows[0] * 2]


def runtime_of(rank: int, size: int):
    return SimpleNamespace(rank=rank, world_size=size)


def test_other_processes_take_all_steps_of_a_checkpoint(learner_of):
    learner = learner_of(2)
    for iteration in range(2):
        learner.iterate(iteration)
    file = learner.replay.state_dict()["processes"]
    fresh = learner.objective.prepare(learner.source.collect(2, Timer()))
    whole = learner.replay.join(fresh)
    for size in (1, 2, 5):
        parts = []
        for rank in range(size):
            replay = Replay(iterations=2, runtime=runtime_of(rank, size))
            replay.load_state_dict({"processes": file * 3})  # of three that kept the same
            parts.append(replay.join(fresh))
            assert not replay.empty
        assert sum(len(part) - len(fresh) for part in parts) == 3 * (len(whole) - len(fresh))
    replay = Replay(iterations=2, runtime=Runtime(device="cpu"))
    replay.load_state_dict({"processes": file})
    again = replay.join(fresh)
    for name in ("x", "x_next", "mean_old", "advantage", "sigma", "parent", "prompt"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
    one, two = (steps.cond.tensors for steps in (again, whole))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_after_an_error_one_process_saves_its_steps_and_one_of_several_saves_nothing(
    make_run, monkeypatch
):
    _, learner, run = make_run(rollout=SMALL, objective={"kind": "grpo"}, optim={"replay": 2})
    with run.session():
        run.begin(learner.policy, learner.optimizer, learner.memories)
        run.log(0, *learner.iterate(0))
        with monkeypatch.context() as patch:  # whose others may be lost
            patch.setattr(Runtime, "world_size", 2)
            run._rescue(ValueError())
            assert run.checkpoints.steps() == [0]
        run._rescue(ValueError())
    assert run.checkpoints.steps() == [0, 1]
    (steps,) = read_checkpoint(run.checkpoints.path(1))["replay"]["processes"]
    assert torch.equal(steps, learner.replay.state_dict()["processes"][0])
    learner.replay.keep(learner.objective.prepare(learner.source.collect(1, Timer())))
    assert not torch.equal(steps, learner.replay.state_dict()["processes"][0])

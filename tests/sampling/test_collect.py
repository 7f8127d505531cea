from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from policies import disturb

from flowrl.backbones.policy import OLD, POLICY
from flowrl.errors import UserError
from flowrl.sampling.rollout import Timer
from flowrl.scoring.executors.base import Answer
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec

PLAIN_TREE = {"tree": {"kind": "flow_grpo"}}
ROLLOUT = {"tree": {"kind": "ode"}}
NFT = {"kind": "nft", "noising": {"count": 2}, "old_decay": {"rate": None, "limit": 0.75}}


def watched(learner) -> list[int]:
    rows, forward = [], learner.policy.network.forward

    def watch(*args, **options):
        rows.append(len(options["hidden_states"]))
        return forward(*args, **options)

    learner.policy.network.forward = watch
    return rows


def test_the_old_policy_draws_where_the_objective_says_so(make_learner):
    for merge_lora in [True, False]:
        learner = make_learner(objective=NFT, rollout=ROLLOUT | {"merge_lora": merge_lora})
        before = learner.source.collect(0, Timer()).tree.x
        disturb(learner.policy, 0.05)
        assert torch.equal(learner.source.collect(0, Timer()).tree.x, before)
        learner.policy.update_old()
        assert not torch.equal(learner.source.collect(0, Timer()).tree.x, before)
        x = learner.policy.network  # and the policy is in use again
        assert x.active_adapters() == [POLICY]


def test_a_rollout_that_fails_does_not_move_the_old_policy(make_learner):
    """Or a run that its rewards stop would, resumed, move it twice."""
    learner = make_learner(objective=NFT, rollout=ROLLOUT, rewards={"broken": broken})
    disturb(learner.policy, 0.05)
    before = learner.policy.weights(OLD)
    with pytest.raises(UserError):
        learner.iterate(3)
    assert all(map(torch.equal, before, learner.policy.weights(OLD)))


def broken(images, prompts, metadata):
    raise RuntimeError("no answer")


def test_training_may_do_without_the_rollouts_guidance(make_learner):
    options = {"guidance_scale": 3.0, "training_guidance_scale": 1.0}
    learner = make_learner(objective={"kind": "sft"}, rollout=ROLLOUT | options)
    plain = make_learner(objective={"kind": "sft"}, rollout=ROLLOUT | {"guidance_scale": 3.0})
    drawn, same = (each.source.collect(0, Timer()) for each in (learner, plain))
    assert torch.equal(drawn.tree.x, same.tree.x)
    learner.learn(drawn, 0)  # the pipeline is tried once on two rows
    rows = watched(learner)
    learner.learn(drawn, 0)
    assert sum(rows) == len(learner.objective.prepare(drawn))  # one row an image, not two


def test_every_network_sees_a_micro_batch_at_most(make_learner):
    learner = make_learner(objective={"kind": "gdro"}, rollout=ROLLOUT, optim={"micro_batch": 3})
    rollout = learner.source.collect(0, Timer())
    rows = watched(learner)
    learner.learn(rollout, 0)
    assert max(rows) == 2  # groups of 4 in two even parts


class Told:
    def __init__(self, events: list[str]):
        self.events = events

    def submit(self, images, prompts, metadata):
        self.events.append(f"given {len(images)}")
        answer: Future[Answer] = Future()
        answer.set_result(Answer(scores=images.mean((1, 2, 3))))
        return answer

    def close(self) -> None: ...


def sampling(learner, **changes):
    return replace(learner.source, generator=replace(learner.source.generator, **changes))


def test_rewards_get_a_batch_of_images_while_the_next_is_drawn(make_learner):
    learner, events = make_learner(rollout=ROLLOUT | PLAIN_TREE), []
    spec = RewardSpec(name="told", reward=broken, executor=Told(events))
    source = sampling(learner, specs=[spec], batch_size=4)
    network = learner.policy.network
    hook = network.register_forward_pre_hook(lambda *_: events.append("drawn"))
    try:
        source.collect(0, Timer())
    finally:
        hook.remove()
    assert events == ["drawn"] * 4 + ["given 4"] + ["drawn"] * 4 + ["given 4"]


class Compares:
    scope = "group"

    def __init__(self):
        self.calls: list[list[str]] = []

    def __call__(self, images, prompts, metadata):
        self.calls.append(list(prompts))
        return (images - images.mean(0)).abs().mean((1, 2, 3))


def test_rewards_that_compare_get_each_whole_group_of_more_than_one_in_one_call(make_learner):
    learner, reward = make_learner(rollout=ROLLOUT | PLAIN_TREE), Compares()
    spec = RewardSpec(name="compares", reward=reward)
    rollout = sampling(learner, specs=[spec], batch_size=3).collect(0, Timer())
    assert [len(call) for call in reward.calls] == [4, 4]
    assert all(len(set(call)) == 1 for call in reward.calls)
    images = rollout.images.view(2, 4, 3, 64, 64)
    apart = (images - images.mean(1, keepdim=True)).abs().mean((2, 3, 4)).flatten()
    torch.testing.assert_close(rollout.scores[:, 0], apart, atol=1 / 255, rtol=0)
    spec = RewardSpec(name="compares", reward=Compares())
    result = score([spec], torch.zeros(3, 3, 4, 4), ["a", "a", "b"], [{}] * 3, group=[0, 0, 1])
    assert result.applicable[:, 0].tolist() == [True, True, False]
    assert result.scores[2].isnan().all()

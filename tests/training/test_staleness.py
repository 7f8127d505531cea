"""Learning one iteration late, and runs that lose a reward and go on: the same weights."""

from pathlib import Path

import pytest
import torch
from crashes import SMALLEST

from flowrl.api import align
from flowrl.backbones.lora_files import FILE
from flowrl.errors import UserError
from flowrl.sampling.rollout import Ahead, Timer
from flowrl.training.checkpoint import Checkpoints

ITERATIONS = 4
NFT = {"kind": "nft", "noising": {"count": 2}}
ROLLOUT = SMALLEST | {"tree": {"kind": "ode"}, "staleness": 1}


@pytest.fixture
def learner_of(make_learner):
    """A learner that samples one iteration ahead, changed as `tiny_config` is."""
    late = {"objective": NFT, "rollout": ROLLOUT, "run": {"iterations": ITERATIONS}}
    return lambda **changes: make_learner(**late | changes)


def weights(folder: Path) -> bytes:
    return (folder / FILE).read_bytes()


def test_an_iteration_is_sampled_with_the_weights_before_the_one_before_it_was_learned(
    learner_of,
):
    late, fresh = learner_of(), learner_of(rollout=ROLLOUT | {"staleness": 0})
    assert isinstance(late.source, Ahead)
    expected = [fresh.source.collect(i, Timer()).images for i in range(2)]  # of the first weights
    for iteration in range(2):
        rollout, _ = late.iterate(iteration)
        assert torch.equal(rollout.images, expected[iteration])
        fresh.iterate(iteration)
    assert not torch.equal(fresh.source.collect(1, Timer()).images, expected[1])
    # Their weights differ from then on by what the second learned from.
    third, _ = late.iterate(2)
    again = learner_of()
    again.iterate(0)
    now = again.source.sampler.collect(2, Timer())  # of the weights after one update
    assert torch.equal(third.images, now.images)


def test_rewards_of_the_next_images_are_asked_before_this_iteration_is_learned(learner_of):
    learner = learner_of()
    events: list[str] = []
    (spec,) = learner.specs
    submit = spec.executor.submit
    spec.executor.submit = lambda *a: events.append("asked") or submit(*a)  # type: ignore
    learn = learner.objective.prepare
    object.__setattr__(learner.objective, "prepare", lambda r: events.append("learned") or learn(r))
    for iteration in range(ITERATIONS):
        learner.iterate(iteration)
    assert events == ["asked", "asked", "learned", *["asked", "learned"] * 2, "learned"]


def test_grpo_learns_late_with_the_ratio_to_the_weights_that_sampled(learner_of):
    chains = ROLLOUT | {"group_size": 4, "batch_size": 4, "tree": {"kind": "flow_grpo"}}
    learner = learner_of(objective={"kind": "grpo"}, rollout=chains)
    _, first = learner.iterate(0)
    assert first["policy/ratio_error_max"] < 1e-3
    rollout = learner.source.collect(1, Timer())
    now = learner.learn(rollout, 1)  # the weights have moved once since it was sampled
    assert now["policy/ratio_error_max"] > 1e-2
    # Given the weights that sampled it, the policy is its own old policy: the means are theirs.
    again = learner_of(objective={"kind": "grpo"}, rollout=chains)
    assert again.learn(rollout, 1)["policy/ratio_error_max"] < 1e-3


def test_what_learns_from_its_own_steps_or_chooses_by_scores_is_refused(learner_of):
    followed = {"objective": {"kind": "refl"}, "specs": [{"name": "tiny_colors"}]}
    followed["prompts"] = {"train": "tiny:color_attr:train"}
    explore = {"candidates": 4, "num_inference_steps": 2, "audit": {"every": 0}}
    for changes, said in (
        (followed, "kind refl follows the gradient along"),
        ({"rollout": ROLLOUT | {"explore": explore}}, "needs scores before it samples"),
    ):
        with pytest.raises(UserError, match=said):
            learner_of(**changes)


class Mean:
    """The images' mean, until it is told to fail at a call."""

    name = "mean"
    deterministic = True

    def __init__(self, fails_at: int = -1):
        self.fails_at, self.calls = fails_at, 0

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("lost")
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("number", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_run_that_fails_between_any_two_iterations_resumes_to_the_weights_of_one_that_does_not(
    tiny_config, tmp_path, number
):
    def config_for(name: str):
        run = {"iterations": ITERATIONS, "checkpoint_every": 9, "output_dir": str(tmp_path / name)}
        return tiny_config(objective=NFT, rollout=ROLLOUT, run=run)

    whole = Mean()
    align(config_for("whole"), rewards={"mean": whole})
    calls = whole.calls - ITERATIONS  # before the first iteration: the check of rewards
    with pytest.raises(UserError, match="lost"):
        align(config_for("failed"), rewards={"mean": Mean(calls + number)})
    assert Checkpoints(tmp_path / "failed", keep=9).steps()[-1] == number - 1
    align(config_for("failed"), rewards={"mean": Mean()}, resume="latest")
    assert weights(tmp_path / "failed") == weights(tmp_path / "whole")

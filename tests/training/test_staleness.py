"""Learning one iteration late, and runs that lose a reward and go on: the same weights."""

from pathlib import Path

import pytest
import torch

from flowrl.api import align
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.lora_files import FILE
from flowrl.errors import UserError
from flowrl.sampling.rollout import Ahead, Timer
from flowrl.training.checkpoint import Checkpoints
from flowrl.utils.distributed import Runtime

ITERATIONS = 4
NFT = {"kind": "nft", "noising": {"count": 2}}


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(name: str, staleness: int = 1, reward: dict | None = None, **changes):
        rollout = {
            "prompts_per_iteration": 1, "group_size": 2, "num_inference_steps": 2,
            "batch_size": 2, "tree": {"kind": "ode"}, "staleness": staleness,
        }  # fmt: skip
        run = {"iterations": ITERATIONS, "checkpoint_every": 9, "output_dir": str(tmp_path / name)}
        return tiny_config(**{
            "objective": NFT, "rollout": rollout, "run": run | {"sample_every": 0, "trackers": []},
            "rewards": [reward or {"name": "brightness"}],
        } | changes)  # fmt: skip

    return make


@pytest.fixture
def learner_of(load_tiny):
    def make(config):
        given = ProvidedObjects(pipeline=load_tiny(config.pipeline.dtype, None))
        return build_learner(config, Runtime(device="cpu"), given)

    return make


def weights(folder: Path) -> bytes:
    return (folder / FILE).read_bytes()


def test_an_iteration_is_sampled_with_the_weights_before_the_one_before_it_was_learned(
    config_for, learner_of
):
    late, fresh = learner_of(config_for("a")), learner_of(config_for("b", staleness=0))
    assert isinstance(late.source, Ahead)
    expected = [fresh.source.collect(i, Timer()).images for i in range(2)]  # of the first weights
    for iteration in range(2):
        rollout, _ = late.iterate(iteration)
        assert torch.equal(rollout.images, expected[iteration])
        fresh.iterate(iteration)
    assert not torch.equal(fresh.source.collect(1, Timer()).images, expected[1])
    # Their weights differ from then on by what the second learned from.
    third, _ = late.iterate(2)
    again = learner_of(config_for("c"))
    again.iterate(0)
    now = again.source.sampler.collect(2, Timer())  # of the weights after one update
    assert torch.equal(third.images, now.images)


def test_rewards_of_the_next_images_are_asked_before_this_iteration_is_learned(
    config_for, learner_of
):
    learner = learner_of(config_for("a"))
    events: list[str] = []
    (spec,) = learner.specs
    submit = spec.executor.submit
    spec.executor.submit = lambda *a: events.append("asked") or submit(*a)  # type: ignore
    learn = learner.objective.prepare
    object.__setattr__(learner.objective, "prepare", lambda r: events.append("learned") or learn(r))
    for iteration in range(ITERATIONS):
        learner.iterate(iteration)
    assert events == ["asked", "asked", "learned", *["asked", "learned"] * 2, "learned"]


def test_grpo_learns_late_with_the_ratio_to_the_weights_that_sampled(config_for, learner_of):
    chains = {"prompts_per_iteration": 1, "group_size": 4, "num_inference_steps": 2,
              "batch_size": 4, "tree": {"kind": "flow_grpo"}, "staleness": 1}  # fmt: skip
    learner = learner_of(config_for("a", objective={"kind": "grpo"}, rollout=chains))
    _, first = learner.iterate(0)
    assert first["policy/ratio_error_max"] < 1e-3
    rollout = learner.source.collect(1, Timer())
    now = learner.learn(rollout, 1)  # the weights have moved once since it was sampled
    assert now["policy/ratio_error_max"] > 1e-2
    # Given the weights that sampled it, the policy is its own old policy: the means are theirs.
    again = learner_of(config_for("b", objective={"kind": "grpo"}, rollout=chains))
    assert again.learn(rollout, 1)["policy/ratio_error_max"] < 1e-3


def test_what_learns_from_its_own_steps_or_chooses_by_scores_is_refused(config_for, learner_of):
    for changes, said in (
        ({"objective": {"kind": "refl"}, "rewards": [{"name": "tiny_colors"}],
          "prompts": {"train": "tiny:color_attr:train"}}, "kind refl follows the gradient along"),
        ({"rollout": {"staleness": 1, "group_size": 2, "num_inference_steps": 2, "batch_size": 4,
                      "tree": {"kind": "ode"},
                      "explore": {"candidates": 4, "num_inference_steps": 2}}},
         "needs scores before it samples"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            learner_of(config_for("a", **changes))


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


@pytest.mark.parametrize(
    "staleness, failing",
    [
        (1, (3,)),
        pytest.param(1, (2, 4), marks=pytest.mark.slow),
        pytest.param(0, (2, 3, 4), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_fails_between_any_two_iterations_resumes_to_the_weights_of_one_that_does_not(
    config_for, tmp_path, staleness, failing
):
    whole = Mean()
    align(config_for("whole", staleness), rewards={"mean": whole})
    calls = whole.calls - ITERATIONS  # before the first iteration: the check of rewards
    for number in failing:
        name = f"failed-{number}"
        with pytest.raises(UserError, match="lost"):
            align(config_for(name, staleness), rewards={"mean": Mean(calls + number)})
        done = Checkpoints(tmp_path / name, keep=9).steps()[-1]
        assert done == number - 1
        align(config_for(name, staleness), rewards={"mean": Mean()}, resume="latest")
        assert weights(tmp_path / name) == weights(tmp_path / "whole"), number

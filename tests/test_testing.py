"""The contract tests for users: each planted fault is named, and what is good passes."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.config.objectives import AdvantageOptions, GRPOOptions, NoisingOptions
from flowrl.objectives.advantage import image_advantages
from flowrl.objectives.base import Needs
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import noise_images
from flowrl.testing import check_objective, check_reward

# --- rewards ------------------------------------------------------------------------------------


def redness(images, prompts, metadata):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def with_reasons(images, prompts, metadata):
    """Good: says why an image has no score."""
    scores = redness(images, prompts, metadata)
    pale = {i: "the image is blank" for i, image in enumerate(images) if image.std() < 0.01}
    return scores.index_fill(0, torch.tensor(list(pale), dtype=torch.long), math.nan), pale


def mutates(images, prompts, metadata):
    return images.mul_(0.5).mean((1, 2, 3))


def all_missing(images, prompts, metadata):
    return [math.nan] * len(images)


# --- objectives ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """Good: flow matching weighted by advantages."""

    noising: NoisingOptions = NoisingOptions(count=1)
    needs: Needs = Needs(states="endpoints", reference=True)

    def prepare(self, rollout):
        advantage, valid = image_advantages(rollout, AdvantageOptions())
        return Endpoints.from_rollout(rollout, advantage, valid, forwards=1, compared="image")

    def loss(self, models, batch):
        points = noise_images(batch, self.noising)
        v = points.velocity(models.policy)
        signal = batch.signal.repeat_interleave(points.count)
        error = (v - points.target).square().flatten(1).mean(1)
        return (signal * error).mean(), {"policy/error": error.mean()}


class WrongDirection(Weighted):
    def loss(self, models, batch):
        return super().loss(models, replace(batch, signal=-batch.signal))


class GroupsMixed(Weighted):
    """Its baseline is the mean over all images."""

    def prepare(self, rollout):
        advantage = rollout.reward - rollout.reward.nanmean()
        return Endpoints.from_rollout(
            rollout, advantage.nan_to_num(0), rollout.valid, forwards=1, compared="image"
        )


class MaskIgnored(Weighted):
    """A missing reward counts as 0."""

    def prepare(self, rollout):
        reward = rollout.reward.nan_to_num(0)
        advantage, _ = image_advantages(
            replace(rollout, reward=reward, valid=reward == reward), AdvantageOptions()
        )
        everything = torch.ones_like(rollout.valid)
        return Endpoints.from_rollout(rollout, advantage, everything, forwards=1, compared="image")


class MicroBatchMean(Weighted):
    """Its baseline is the mean of a micro-batch."""

    def loss(self, models, batch):
        return super().loss(models, replace(batch, signal=batch.signal - batch.signal.mean()))


class WritesIntoRollout(Weighted):
    def prepare(self, rollout):
        rollout.reward.mul_(2)
        return super().prepare(rollout)


class OtherKernel:
    """Steps by another law than the sampler's."""

    def __init__(self):
        self.inner = GRPOOptions().build("cps")
        self.needs, self.prepare, self.loss = self.inner.needs, self.inner.prepare, self.inner.loss


class Undeclared(Weighted):
    """Calls a model that `needs` does not name."""

    def loss(self, models, batch):
        points = noise_images(batch, self.noising)
        points.velocity(models.old)
        return super().loss(models, batch)


OBJECTIVES = {  # the fault, and the words that name it
    WrongDirection: "direction",
    GroupsMixed: "groups",
    MaskIgnored: "missing",
    MicroBatchMean: "micro-batches",
    WritesIntoRollout: "changes the rollout",
    OtherKernel: "ratio",
    Undeclared: "models.old",
}

# --- facts --------------------------------------------------------------------------------------


def test_a_good_reward_passes_and_one_that_is_wrong_or_changes_its_images_is_named():
    check_reward(with_reasons, size=(32, 32))
    for fault in (mutates, all_missing):
        with pytest.raises(AssertionError, match=f"^{fault.__name__}: "):
            check_reward(fault, size=(32, 32))


@pytest.fixture
def small(load_tiny, monkeypatch):
    """Checks of objectives compute half of the blocks."""
    monkeypatch.setattr("flowrl.testing.load_pipeline", lambda *_, **__: load_tiny())


def custom(kind):
    """The recipe's `objective` for a class of this file."""
    return {"kind": "custom", "target": f"{__name__}:{kind.__name__}"}


QUICK = (WrongDirection, OtherKernel, MaskIgnored)  # without --slow


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=() if f in QUICK else pytest.mark.slow, id=f.__name__)
        for f in OBJECTIVES
    ],
)
def test_an_objectives_fault_is_named(small, fault):
    tree = "flow_grpo" if fault is OtherKernel else "ode"
    with pytest.raises((AssertionError, ValueError), match=OBJECTIVES[fault]):
        check_objective(custom(fault), tree)


def test_a_good_objective_passes(small):
    check_objective(custom(Weighted))

"""The contract tests for users: each planted fault is named, and what is good passes."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.config.objectives import AdvantageOptions, GRPOOptions, NoisingOptions
from flowrl.functional.gaussian import log_ratio
from flowrl.objectives.advantage import image_advantages
from flowrl.objectives.base import Models, Needs
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


def batch_size(images, prompts, metadata):
    return redness(images, prompts, metadata) / len(images)


def against_the_batch(images, prompts, metadata):
    scores = redness(images, prompts, metadata)
    return scores - scores.mean()


def wrong_length(images, prompts, metadata):
    return redness(images, prompts, metadata)[:1]


def order(images, prompts, metadata):
    return redness(images, prompts, metadata) + torch.arange(len(images)) / 10


def mutates(images, prompts, metadata):
    return images.mul_(0.5).mean((1, 2, 3))


def chance(images, prompts, metadata):
    return torch.rand(len(images))


def raises(images, prompts, metadata):
    raise RuntimeError("no weights here")


def all_missing(images, prompts, metadata):
    return [math.nan] * len(images)


REWARDS = (batch_size, against_the_batch, wrong_length, order, mutates, chance, raises, all_missing)

# --- objectives ---------------------------------------------------------------------------------


def grpo(**options):
    return GRPOOptions(**options).build()


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
        return (signal * error).mean(), {"policy/error": error.detach().mean()}


class GraphInMetrics(Weighted):
    """Forgets a detach: what is logged keeps the graph."""

    def loss(self, models, batch):
        loss, _ = super().loss(models, batch)
        return loss, {"policy/error": loss}


class ComparedWithItself:
    """Forgets a detach: the ratio to the step that was just computed is 1 whatever it is."""

    def __init__(self):
        self.grpo = grpo()
        self.needs, self.prepare = self.grpo.needs, self.grpo.prepare

    def loss(self, models: Models, batch):
        parent = batch.parent
        v = models.policy(batch.x, batch.sigma, batch.cond.take(batch.prompt)).float()[parent]
        steps = (batch.sigma[parent], batch.sigma_next, batch.g)
        mean, std = self.grpo.kernel.step(batch.x[parent].float(), v, *steps)
        ratio = log_ratio(batch.x_next.float(), mean, mean, std).exp()
        return -(ratio * batch.advantage).mean(), {"policy/ratio_error_max": torch.zeros(())}


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


class NaNLearned(Weighted):
    """A missing reward is learned from."""

    def prepare(self, rollout):
        everything = torch.ones_like(rollout.valid)
        return Endpoints.from_rollout(
            rollout, rollout.reward, everything, forwards=1, compared="image"
        )


class MicroBatchMean(Weighted):
    """Its baseline is the mean of a micro-batch."""

    def loss(self, models, batch):
        return super().loss(models, replace(batch, signal=batch.signal - batch.signal.mean()))


class WritesIntoRollout(Weighted):
    def prepare(self, rollout):
        rollout.reward.mul_(2)
        return super().prepare(rollout)


class ByChance(Weighted):
    def loss(self, models, batch):
        signal = batch.signal * (1 + torch.rand(len(batch.signal)))
        return super().loss(models, replace(batch, signal=signal))


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


class CutGradient(Weighted):
    """A gradient that is not the loss's: its sign is turned on the way."""

    def loss(self, models, batch):
        loss, metrics = super().loss(models, batch)
        return 2 * loss.detach() - loss, metrics


OBJECTIVES = {  # the fault, and the words that name it
    GraphInMetrics: "objective: detach",
    ComparedWithItself: "objective: the gradient's norm",
    WrongDirection: "direction",
    GroupsMixed: "groups",
    MaskIgnored: "missing",
    NaNLearned: "missing",
    MicroBatchMean: "micro-batches",
    WritesIntoRollout: "changes the rollout",
    ByChance: "the same rollout twice",
    OtherKernel: "ratio",
    Undeclared: "models.old",
    CutGradient: "gradient",
}

# --- facts --------------------------------------------------------------------------------------


def some(faults, sample):
    """Those of the sample in the default tests, all with --slow."""
    return [
        pytest.param(f, marks=() if f in sample else pytest.mark.slow, id=f.__name__)
        for f in faults
    ]


@pytest.mark.parametrize("fault", REWARDS)
def test_a_rewards_fault_is_named(fault):
    with pytest.raises(AssertionError, match=f"^{fault.__name__}: "):
        check_reward(fault, size=(32, 32))


@pytest.mark.parametrize("good", [redness, with_reasons])
def test_a_good_reward_passes(good):
    check_reward(good, size=(32, 32))


@pytest.fixture
def small(load_tiny, monkeypatch):
    """Checks of objectives compute half of the blocks."""
    monkeypatch.setattr("flowrl.testing.load_pipeline", lambda *_, **__: load_tiny())


def custom(kind):
    """The recipe's `objective` for a class of this file."""
    return {"kind": "custom", "target": f"{__name__}:{kind.__name__}"}


SAMPLE = (WrongDirection, OtherKernel, MaskIgnored)


@pytest.mark.parametrize("fault", some(OBJECTIVES, SAMPLE))
def test_an_objectives_fault_is_named(small, fault):
    tree = "flow_grpo" if fault in (ComparedWithItself, OtherKernel) else "ode"
    with pytest.raises((AssertionError, ValueError), match=OBJECTIVES[fault]):
        check_objective(custom(fault), tree)


def test_a_good_objective_passes(small):
    check_objective(custom(Weighted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["grpo", "nft", "dpo", "gdro", "lair", "dgpo", "kto", "awm", "rwr", "sft", "refl", "srpo"],
)
def test_objectives_of_flowrl_pass(kind):
    options = {"kl_coef": 0.1} if kind == "grpo" else {}
    if kind in ("awm", "kto", "nft", "rwr", "sft"):  # whose default noise levels are few
        options = {"noising": {"count": 8}}
    tree = "flow_grpo" if kind == "grpo" else "ode"
    check_objective({"kind": kind} | options, tree)

"""Contract tests for an objective or a reward of your own; call them from pytest.

Each raises AssertionError with one sentence: the fact that does not hold, its figure, and what to
change. They run on a CPU in seconds; objectives learn from a rollout of a built-in pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.policy import POLICY
from flowrl.config import parse_config
from flowrl.config.objectives import GRPOOptions, NoisingOptions, RWROptions
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import Timer
from flowrl.scoring import check as scoring
from flowrl.scoring.executors.base import read_answer
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import RewardSpec
from flowrl.training.loop import Learner
from flowrl.training.metrics import RowMeans
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime

SUM_ORDER = 1e-3  # largest relative distance between gradients whose sums differ in order


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|: 0 for equal tensors, inf where one has NaN."""
    actual, expected = actual.double(), expected.double()
    if torch.equal(actual, expected):
        return 0.0
    relative = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    return relative.item() if relative.isfinite() else float("inf")


def _expect(holds: bool, topic: str, sentence: str) -> None:
    if not holds:
        raise AssertionError(f"{topic}: {sentence}")


# --- rewards ------------------------------------------------------------------------------------


def check_reward(
    reward: Any, prompts: Sequence[PromptRecord] = (), size: tuple[int, int] = scoring.SIZE
) -> None:
    """Check a reward as training does before it starts, and that it leaves its inputs unchanged.

    Args:
        reward: callable (images, prompts, metadata) -> scores, or (scores, reasons).
        prompts: for a reward without fixtures; generic ones where empty.
        size: height and width of the images, in pixels.

    Raises:
        AssertionError: what is wrong, or missing on this machine.
    """
    spec = RewardSpec(name=getattr(reward, "__name__", type(reward).__name__), reward=reward)
    result = scoring.check_reward(spec, prompts, size=size)
    _expect(
        result.state not in ("problem", "missing"), spec.name,
        f"{result.detail} {result.remedy}".rstrip(),
    )  # fmt: skip
    for trial in scoring.trials_of(spec, prompts, size)[:1]:
        images = quantise(trial.images)
        before, texts = images.clone(), [trial.prompt] * len(images)
        metadata = [dict(trial.metadata) for _ in images]
        with torch.no_grad():
            read_answer(reward(images, texts, metadata), len(images))
        same = torch.equal(images, before) and all(m == trial.metadata for m in metadata)
        _expect(
            same and texts == [trial.prompt] * len(images), spec.name,
            "it changes its images, prompts or metadata: work on copies, other rewards get them",
        )  # fmt: skip


# --- objectives ---------------------------------------------------------------------------------


def check_objective(section: Mapping[str, Any], tree: str = "ode") -> None:
    """Check that an objective learns towards high rewards, on a rollout of a built-in pipeline.

    Args:
        section: the recipe's `objective`: `{"kind": "custom", "target": "my_module:MyObjective"}`.
        tree: `rollout.tree.kind`; "flow_grpo" for an objective that learns from stochastic steps.

    Raises:
        AssertionError: the first fact that does not hold.
    """
    config = parse_config(_recipe(tree, section))
    pipeline = load_pipeline("tiny-sd3", dtype="fp32", device="cpu")
    learner = build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=pipeline))
    _move_off_base(learner)
    rollout, needs = learner.source.collect(0, Timer()), learner.objective.needs
    if needs.reward_grad:  # its loss carries gradients of rewards, and is not a number that falls
        _check_micro_batches(learner, rollout, _check_first_gradient(learner, rollout))
        return
    rollout = _with_rewards(rollout, _distinct_rewards(rollout))
    _check_micro_batches(learner, rollout, _check_first_gradient(learner, rollout))
    if needs.states != "path":
        _check_direction(learner, rollout)
    if not needs.update_mean:
        _check_groups(learner, rollout)
    _check_missing(learner, rollout)


def _recipe(tree: str, objective: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pipeline": {"path": "tiny-sd3", "device": "cpu", "max_sequence_length": 12},
        "lora": {"rank": 2, "alpha": 4},
        "prompts": {"train": "tiny:color_attr:train"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 4,
                    "tree": {"kind": tree}},
        "rewards": [{"name": "tiny_colors"}],
        "objective": dict(objective),
        "run": {"trackers": []},
    }  # fmt: skip


@torch.no_grad()
def _move_off_base(learner: Learner) -> None:
    """Change every adapter, so that no ratio is 1 and no difference 0 for lack of training."""
    generator = torch.Generator().manual_seed(0)
    for adapter in learner.policy.state_dict()["adapters"].values():
        for tensor in adapter:
            tensor += 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor)


def _distinct_rewards(rollout: Rollout) -> Tensor:
    """Return rewards (N,) that differ within and between groups."""
    generator, count = torch.Generator().manual_seed(1), len(rollout.group)
    return torch.randperm(count, generator=generator) / count + rollout.group.cpu() / 2


def _with_rewards(rollout: Rollout, reward: Tensor) -> Rollout:
    """Return the rollout with other rewards (N,), NaN where one is missing."""
    kinds = max(len(rollout.names), 1)
    scores = reward[:, None].expand(-1, kinds).clone()
    return replace(
        rollout, reward=reward, valid=reward.isfinite(), scores=scores,
        applicable=torch.ones_like(scores, dtype=torch.bool),
        weights=torch.full((kinds,), 1 / kinds),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one update's loss."""

    value: Tensor  # (parameters,) fp32
    metrics: dict[str, float]

    @property
    def norm(self) -> float:
        return self.value.double().norm().item()


def gradient(learner: Learner, rollout: Rollout, parts: int = 1, part: int = 0) -> Gradient:
    """Return the gradient of the loss on a rollout, or on one of several parts of it."""
    means = RowMeans()
    batch: Any = learner.objective.prepare(rollout).updates(parts)[part]
    if len(batch):
        learner.backward(batch, len(batch), rollout, means)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.policy.parameters()]
    learner.optimizer.zero_grad()
    return Gradient(
        value=torch.cat([g.detach().flatten().cpu() for g in grads]), metrics=means.result()
    )


def _check_first_gradient(learner: Learner, rollout: Rollout) -> Gradient:
    """Check that a gradient is finite, repeatable and starts at ratio 1; return it."""
    before = _content(rollout)
    first = gradient(learner, rollout)
    topic = "objective"
    _expect(before == _content(rollout), topic, "`prepare` or `loss` changes the rollout's tensors")
    _expect(
        bool(first.value.isfinite().all()) and first.norm > 0, topic,
        f"the gradient's norm is {first.norm:.3g}: a part is detached that must not be, or the "
        "policy is compared with itself without detach",
    )  # fmt: skip
    moved = distance(gradient(learner, rollout).value, first.value)
    _expect(
        moved <= SUM_ORDER, topic,
        f"the same rollout twice gives gradients that differ by {moved:.1e}: random numbers must "
        "be a function of the batch's seed",
    )  # fmt: skip
    if learner.objective.needs.ratio:
        error = first.metrics.get("policy/ratio_error_max", float("inf"))
        _expect(
            error <= learner.ratio_tolerance, "ratio",
            f"policy/ratio_error_max is {error:.1e} before any update: compute the step with the "
            "sampler's kernel, sigmas and dtype",
        )  # fmt: skip
    return first


def _content(rollout: Rollout) -> list[bytes]:
    tensors = [rollout.tree.x, rollout.tree.mean_old, rollout.tree.log_prob, rollout.reward,
               rollout.scores, rollout.valid]  # fmt: skip
    return [t.detach().cpu().double().numpy().tobytes() for t in tensors]


def _check_micro_batches(learner: Learner, rollout: Rollout, first: Gradient) -> None:
    """The size of micro-batches must not change the gradient."""
    for size in (1, 3):
        small = replace(learner, optim=learner.optim.model_copy(update={"micro_batch": size}))
        moved = distance(gradient(small, rollout).value, first.value)
        _expect(
            moved <= SUM_ORDER, "micro-batches",
            f"optim.micro_batch {size} changes the gradient by {moved:.1e}: the loss must be a "
            "mean over independent rows, or the batch must keep together what is compared",
        )  # fmt: skip


def _check_direction(learner: Learner, rollout: Rollout) -> None:
    """Images with high rewards must become more likely, as with the plainest objective."""
    # At a temperature of 1 weights grow about linearly with rewards.
    plain = RWROptions(tau=1.0, noising=NoisingOptions(count=4)).build()
    if learner.objective.needs.states == "transitions":
        plain = GRPOOptions().build()
    # What turning the rewards around changes: what does not depend on them cancels.
    turned = _with_rewards(rollout, -rollout.reward)
    change, expected = (
        gradient(o, rollout).value - gradient(o, turned).value
        for o in (learner, replace(learner, objective=plain))
    )
    likeness = torch.cosine_similarity(change.double(), expected.double(), dim=0, eps=1e-30).item()
    _expect(
        likeness > -0.05, "direction",
        f"the cosine with a plain objective's gradient is {likeness:.2f}: turn its sign, or "
        "draw more noise levels for each image (noising.count)",
    )  # fmt: skip


def _check_groups(learner: Learner, rollout: Rollout) -> None:
    """Higher rewards for all images of one prompt must not change another prompt's gradient."""
    groups = len(rollout.group.unique())
    before = gradient(learner, rollout, groups, 0)
    reward, elsewhere = rollout.reward.cpu(), rollout.group.cpu() % groups != 0
    # This shift keeps the standard deviation over all images, by which some objectives divide.
    shift = 2 * (reward[~elsewhere].mean() - reward[elsewhere].mean())
    shifted = _with_rewards(rollout, reward + shift * elsewhere)
    moved = distance(gradient(learner, shifted, groups, 0).value, before.value)
    _expect(
        moved <= SUM_ORDER, "groups",
        f"higher rewards of other prompts change a prompt's gradient by {moved:.1e}: compare "
        "images within their group (`rollout.group`)",
    )  # fmt: skip


def _check_missing(learner: Learner, rollout: Rollout) -> None:
    """An image without a reward must not be learned from, whatever it shows."""
    lost, reward = 1, rollout.reward.cpu().clone()
    reward[lost] = torch.nan
    without = _with_rewards(rollout, reward)
    # At the base model, where a KL penalty, which needs no reward, has no gradient.
    for name, parameter in learner.policy.network.named_parameters():
        if f".lora_B.{POLICY}." in name:
            parameter.data.zero_()
    first, tree = gradient(learner, without), without.tree
    _expect(bool(first.value.isfinite().all()), "missing", "a missing reward gives NaN")
    if len(tree.leaf) > 1:
        return  # its latents are also those of other images
    x, mean = tree.x.clone(), tree.mean_old.clone()
    x[lost], mean[lost] = 3 * x[lost] + 1, 3 * mean[lost] + 1
    changed = replace(without, tree=replace(tree, x=x, mean_old=mean))
    moved = distance(gradient(learner, changed).value, first.value)
    _expect(
        moved <= SUM_ORDER, "missing",
        f"the image without a reward changes the gradient by {moved:.1e}: leave out images whose "
        "`valid` is false",
    )  # fmt: skip

"""Does an objective learn what the rewards say? On a rollout of the recipe, with known rewards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.policy import POLICY
from flowrl.errors import CheckResult
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.grpo import GRPO
from flowrl.objectives.noising import Noising, UniformTimes, velocity_error
from flowrl.objectives.tree_credit import TreeCredit
from flowrl.sampling.rollout import Timer
from flowrl.training.loop import Learner
from flowrl.training.metrics import RowMeans
from flowrl.trajectory import Metrics, Rollout
from flowrl.verify.figures import cosine, distance, failed, judged, passed, unsure

SAME = 1e-3  # between two gradients that differ by the order of sums alone
TOPIC = "objective"


def check_objective_on(learner: Learner, kernel: str) -> Iterator[CheckResult]:
    """Check the learner's objective: ratio, gradient, micro-batches, groups, missing rewards.

    The policy is moved off the base first, so that nothing is 0 or 1 for lack of training.
    kernel: rollout.kernel.
    """
    needs = learner.objective.needs
    move(learner)
    rollout = rewarded(learner.source.collect(0, Timer()), scored=needs.reward_grad)
    before = _copies(rollout)
    first = gradient_of(learner, rollout)
    same = _copies(rollout) == before
    detail = "the rollout is as it was before" if same else "it writes into the rollout's tensors"
    yield judged(TOPIC, same, detail, "`prepare` and `loss` must leave the rollout as it is.")
    yield from _check_numbers(first)
    if not first.value.isfinite().all() or not first.size:
        return
    again = gradient_of(learner, rollout)
    apart = distance(again.value, first.value)
    yield judged(TOPIC, apart <= SAME, f"the same rollout twice: gradients {apart:.1e} apart",
                 "Randomness must be a function of the batch's seed.")  # fmt: skip
    yield from _check_ratio(learner, first)
    yield from _check_parts(learner, rollout, first)
    if not needs.reward_grad:  # whose loss is no number that falls, only a carrier of gradients
        yield from _check_slope(learner, rollout, first)
        yield from _check_direction(learner, rollout, first, kernel)
        yield from _check_groups(learner, rollout)
    yield from _check_missing(learner, rollout)


@torch.no_grad()
def move(learner: Learner, share: float = 0.02) -> None:
    """Move the policy, and the old one elsewhere, off the base."""
    generator = torch.Generator().manual_seed(0)
    for adapter in learner.policy.state_dict()["adapters"].values():
        for tensor in adapter:
            tensor += share * torch.randn(tensor.shape, generator=generator).to(tensor)


def rewarded(rollout: Rollout, *, scored: bool) -> Rollout:
    """Return the rollout with rewards that differ within and between its groups, none missing.

    scored: keep the rewards' own scores, which reward gradients are of.
    """
    if scored:
        return rollout
    count, kinds = len(rollout.group), max(len(rollout.names), 1)
    generator = torch.Generator().manual_seed(1)
    reward = torch.randperm(count, generator=generator) / count + rollout.group.cpu() / 2
    return _with_rewards(rollout, reward, torch.ones(count, dtype=torch.bool), kinds)


def _with_rewards(rollout: Rollout, reward: Tensor, valid: Tensor, kinds: int) -> Rollout:
    each = reward.nan_to_num(torch.nan)[:, None].expand(-1, kinds).clone()
    return replace(
        rollout, reward=reward, valid=valid, scores=each, terms=each,
        applicable=torch.ones_like(each, dtype=torch.bool),
        weights=torch.full((kinds,), 1 / kinds),
    )  # fmt: skip


def _copies(rollout: Rollout) -> list[int]:
    """Return what is in the rollout's tensors, as one number each."""
    tensors = [rollout.tree.x, rollout.tree.mean_old, rollout.tree.log_prob, rollout.reward,
               rollout.scores, rollout.terms, rollout.valid]  # fmt: skip
    return [hash(t.detach().cpu().double().nan_to_num(7).numpy().tobytes()) for t in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradient:
    value: Tensor  # (parameters,)
    loss: float
    metrics: dict[str, float]
    kept: tuple[str, ...]  # metrics that still hold a graph

    @property
    def size(self) -> float:
        return self.value.double().norm().item()


def gradient_of(learner: Learner, rollout: Rollout, parts: int = 1, part: int = 0) -> _Gradient:
    """Return the gradient of the loss on a rollout, or on one of several parts of it."""
    watched = _Watched(learner.objective)
    learner = replace(learner, objective=watched)
    means, parameters = RowMeans(), learner.policy.parameters()
    batch: Any = watched.prepare(rollout)
    batch = batch.updates(parts)[part]
    if len(batch):
        learner.backward(batch, len(batch), rollout, means)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    learner.optimizer.zero_grad()
    metrics = means.result()
    return _Gradient(
        value=torch.cat([g.detach().flatten().cpu() for g in found]),
        loss=metrics.get("loss", 0.0), metrics=metrics, kept=tuple(sorted(watched.kept)),
    )  # fmt: skip


class _Watched:
    """An objective, and which of its metrics came with a graph."""

    def __init__(self, objective: Any):
        self.objective, self.kept = objective, set()
        self.needs, self.prepare = objective.needs, objective.prepare

    def loss(self, models: Models, batch: Any) -> tuple[Tensor, Metrics]:
        loss, metrics = self.objective.loss(models, batch)
        self.kept |= {name for name, value in metrics.items() if value.requires_grad}
        return loss, {name: value.detach() for name, value in metrics.items()}


def _check_numbers(found: _Gradient) -> Iterator[CheckResult]:
    finite = bool(found.value.isfinite().all())
    yield judged(
        TOPIC, finite and found.size > 0, f"loss {found.loss:.4g}, gradient {found.size:.3g}",
        "Nothing can be learned from it: is a part detached that should not be, or is the policy "
        "compared with itself without detach?",
    )  # fmt: skip
    if found.kept:
        yield failed(
            TOPIC, f"metrics with a graph: {', '.join(found.kept)}",
            "Detach what is logged: graphs are kept until the metrics are.",
        )  # fmt: skip


def _check_ratio(learner: Learner, first: _Gradient) -> Iterator[CheckResult]:
    if not learner.objective.needs.ratio:
        return
    error = first.metrics.get("policy/ratio_error_max")
    if error is None:
        yield unsure("ratio", "no metric policy/ratio_error_max",
                     "Log it: training stops where the first ratio is not 1.")  # fmt: skip
        return
    yield judged(
        "ratio", error <= learner.optim.ratio_tolerance,
        f"the policy's to itself is off by {error:.1e} nats",
        "Compute the step as the sampler does: same kernel, sigmas and dtype.",
    )  # fmt: skip


def _check_parts(learner: Learner, rollout: Rollout, first: _Gradient) -> Iterator[CheckResult]:
    """The size of micro-batches is a matter of memory alone."""
    worst = 0.0
    for size in (1, 3):
        small = replace(learner, optim=learner.optim.model_copy(update={"micro_batch": size}))
        worst = max(worst, distance(gradient_of(small, rollout).value, first.value))
    yield judged(
        "micro-batches", worst <= SAME, f"gradients of small ones are {worst:.1e} apart",
        "The loss must be a mean over rows that are independent of each other, or the batch keeps "
        "together what is compared (`compared`, `chunks`).",
    )  # fmt: skip


def _check_slope(learner: Learner, rollout: Rollout, first: _Gradient) -> Iterator[CheckResult]:
    """Compare the gradient with finite differences of the loss along it."""
    way = first.value / first.size
    found = [_slope(learner, rollout, way, step) for step in (3e-2, 1e-2, 3e-3, 1e-3)]
    nearest = min(found, key=lambda f: abs(f - first.size))
    error = abs(nearest - first.size) / first.size
    detail = f"the loss rises by {nearest:.3g} along it, by its size {first.size:.3g}"
    if error < 0.05:
        yield passed("gradient", detail)
    elif nearest > -0.05 * first.size:
        yield unsure("gradient", detail, "Parts of the loss are held constant (detach); meant so?")
    else:
        yield failed("gradient", detail, "A step along it raises the loss: look for its sign.")


def _slope(learner: Learner, rollout: Rollout, way: Tensor, step: float) -> float:
    ends = []
    for sign in (1, -1):
        _shift(learner, way, sign * step)
        ends.append(gradient_of(learner, rollout).loss)
        _shift(learner, way, -sign * step)
    return (ends[0] - ends[1]) / (2 * step)


@torch.no_grad()
def _shift(learner: Learner, way: Tensor, by: float) -> None:
    start = 0
    for parameter in learner.policy.parameters():
        part = way[start : start + parameter.numel()].view_as(parameter)
        parameter += by * part.to(parameter)
        start += parameter.numel()


def _check_direction(
    learner: Learner, rollout: Rollout, first: _Gradient, kernel: str
) -> Iterator[CheckResult]:
    """Does it make images more likely whose rewards are above those of their group?"""
    states = learner.objective.needs.states
    plain: Any = _TowardsReward()
    if states == "transitions":
        plain = GRPO(kernel=KERNELS[kernel], credit=TreeCredit())
    elif states != "endpoints":
        return
    found = cosine(first.value, gradient_of(replace(learner, objective=plain), rollout).value)
    detail = f"its gradient and that of more likely good images have the cosine {found:.2f}"
    if found < -0.05:
        yield failed("direction", detail, "It learns towards low rewards: turn its sign.")
    elif found < 0.05:
        yield unsure("direction", detail, "Does it read the rewards?")
    else:
        yield passed("direction", detail)


class _TowardsReward:
    """The plainest objective on images: errors weighted by the reward above its group's mean."""

    def __init__(self) -> None:
        self.noising = Noising(times=UniformTimes(), count=4)

    def prepare(self, rollout: Rollout) -> Endpoints:
        reward, group = rollout.reward.cpu(), rollout.group.cpu()
        count = group.bincount()
        mean = torch.zeros(len(count)).index_add(0, group, reward) / count
        keep = torch.ones_like(group, dtype=torch.bool)
        return Endpoints.from_rollout(
            rollout, reward - mean[group], keep, forwards=4, compared="image"
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        points = self.noising(batch)
        error = velocity_error(points.velocity(models.policy), points.target)
        return (batch.signal.repeat_interleave(points.count) * error).mean(), {}

    @property
    def needs(self) -> Needs:
        return Needs(states="endpoints")


def _check_groups(learner: Learner, rollout: Rollout) -> Iterator[CheckResult]:
    """More for all images of one prompt says nothing about another prompt's."""
    groups = rollout.group.unique()
    needs = learner.objective.needs
    if needs.whole_update or needs.update_mean or len(groups) < 2:
        return
    own = gradient_of(learner, rollout, len(groups), 0)
    kinds, reward = max(len(rollout.names), 1), rollout.reward.cpu()
    others = rollout.group.cpu() % len(groups) != 0
    # The mean over all images moves, and their standard deviation does not, which some divide by.
    by = 2 * (reward[~others].mean() - reward[others].mean())
    shifted = _with_rewards(rollout, reward + by * others, rollout.valid, kinds)
    apart = distance(gradient_of(learner, shifted, len(groups), 0).value, own.value)
    yield judged(
        "groups", apart <= SAME,
        f"{by:+.2g} for all images of other prompts moves a prompt's gradient by {apart:.1e}",
        "Compare images with those of their own group (`rollout.group`).",
    )  # fmt: skip


def _check_missing(learner: Learner, rollout: Rollout) -> Iterator[CheckResult]:
    """An image without a reward must not be learned from, whatever it looks like."""
    lost = 1
    if learner.objective.needs.reward_grad or len(rollout.group) < 4:
        return
    kinds = max(len(rollout.names), 1)
    reward, valid = rollout.reward.cpu().clone(), rollout.valid.cpu().clone()
    reward[lost], valid[lost] = torch.nan, False
    without = _with_rewards(rollout, reward, valid, kinds)
    with _at_base(learner):  # where the pull to it, which needs no reward, has no gradient
        yield _missing(learner, without, lost)


@contextmanager
def _at_base(learner: Learner) -> Iterator[None]:
    """Let the policy be the base inside the block, with gradients of its second factors."""
    second = [p for name, p in learner.policy.network.named_parameters()
              if f".lora_B.{POLICY}." in name]  # fmt: skip
    kept = [p.data.clone() for p in second]
    for parameter in second:
        parameter.data.zero_()
    try:
        yield
    finally:
        for parameter, data in zip(second, kept, strict=True):
            parameter.data.copy_(data)


def _missing(learner: Learner, without: Rollout, lost: int) -> CheckResult:
    """Compare gradients of a rollout with other latents of the image without a reward."""
    first, tree = gradient_of(learner, without), without.tree
    if len(tree.leaf) > 1:  # its latents are other images', too
        return judged("missing", bool(first.value.isfinite().all()),
                      f"gradient {first.size:.3g} with one reward missing",
                      "Leave out images whose `valid` is false.")  # fmt: skip
    x, mean = tree.x.clone(), tree.mean_old.clone()
    x[lost], mean[lost] = 3 * x[lost] + 1, 3 * mean[lost] + 1
    other = replace(without, tree=replace(tree, x=x, mean_old=mean))
    apart = distance(gradient_of(learner, other).value, first.value)
    return judged(
        "missing", apart <= SAME,
        f"with one reward missing the gradient is {first.size:.3g}, and that image moves it by "
        f"{apart:.1e}",
        "Leave out images whose `valid` is false; their reward is NaN.",
    )  # fmt: skip

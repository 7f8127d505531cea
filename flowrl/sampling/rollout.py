"""Rollouts: trees of noise for prompts are sampled, decoded and scored by `RolloutGenerator`."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flowrl.backbones.base import VelocityField
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import phase
from flowrl.functional.batches import ALONE, Batches
from flowrl.functional.noise import keyed_noise, noise_seed
from flowrl.functional.sde import StepKernel
from flowrl.prompts.book import PromptBook
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.rollout_model import RolloutModel
from flowrl.sampling.sampler import Schedule, sample_tree
from flowrl.scoring.combine import check_invalid, combine, train_weights
from flowrl.scoring.scorer import SamplerFailure, Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trajectory import Conditioning, Explored, Rollout, Tree
from flowrl.trees.plan import TreePlan, continued_widths, level_widths
from flowrl.utils.devices import send
from flowrl.utils.distributed import Postponed, Runtime

if TYPE_CHECKING:
    from flowrl.sampling.rewording import Rewording
    from flowrl.sampling.two_stage import Explorer


class Timer:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """R trees to sample.

    A tree depends on (seed, iteration, uid of its prompt, root), the plan and the network alone:
    not on the other trees, nor on the process that samples it. Results are equal bit for bit at
    equal rows of a call of the network (`Tree.rows`, logged as `tree/rows`), and up to rounding at
    others.
    """

    prompts: Sequence[PromptRecord]  # P
    prompt: Tensor  # (R,) long, index into `prompts`
    group: Tensor  # (R,) long, trees of one group are compared
    root: Tensor  # (R,) long, number of the tree among those of its prompt
    seed: int
    iteration: int
    same_noise: bool = False  # all roots of a prompt start from one noise
    stopped: Tree | None = None  # these trees where a plan stopped them; they go on from there

    def only(self, rows: Tensor) -> "RolloutRequest":
        """Return the trees `rows` (N,) long, of the same list of prompts."""
        numbers = {name: getattr(self, name)[rows] for name in ("prompt", "group", "root")}
        stopped = None if self.stopped is None else self.stopped.take(rows)
        return replace(self, **numbers, stopped=stopped)

    def take(self, rows: Tensor) -> "RolloutRequest":
        """Return the trees `rows` (N,) long, with only the prompts they use."""
        used, prompt = self.prompt[rows].unique(return_inverse=True)
        prompts = [self.prompts[i] for i in used.tolist()]
        return replace(self.only(rows), prompts=prompts, prompt=prompt)

    def noise(self, path: tuple[int, ...], step: int, role: str, shape: Sequence[int]) -> Tensor:
        """Return one noise per tree for the node at `path`: (R, *shape) fp32 on the CPU."""
        shared = role == "init" and self.same_noise
        seeds = [
            noise_seed(
                seed=self.seed,
                iteration=self.iteration,
                prompt=self.prompts[p].uid,
                root=0 if shared else r,
                path=path,
                step=step,
                role=role,
            )
            for p, r in zip(self.prompt.tolist(), self.root.tolist(), strict=True)
        ]
        return keyed_noise(seeds, shape, device="cpu")


def occurrences(prompts: Sequence[PromptRecord]) -> list[int]:
    """Return how often each prompt stands earlier in the list: 0 unless it is repeated."""
    seen: Counter[str] = Counter()
    earlier = []
    for prompt in prompts:
        earlier.append(seen[prompt.uid])
        seen[prompt.uid] += 1
    return earlier


def group_request(
    prompts: Sequence[PromptRecord],
    plan: TreePlan,
    *,
    seed: int,
    iteration: int,
    merge: bool = False,
) -> RolloutRequest:
    """Request the plan's trees for every prompt; those of one prompt are a group, side by side.

    A repeated prompt, with roots of its own, makes another group, or with `merge` a larger one.
    """
    place = torch.arange(len(prompts))
    number = {uid: n for n, uid in enumerate(dict.fromkeys(p.uid for p in prompts))}
    group = torch.tensor([number[p.uid] for p in prompts]) if merge else place
    first = torch.tensor(occurrences(prompts)) * plan.roots
    return RolloutRequest(
        prompts=prompts,
        prompt=place.repeat_interleave(plan.roots),
        group=group.repeat_interleave(plan.roots),
        root=(first[:, None] + torch.arange(plan.roots)).flatten(),
        seed=seed,
        iteration=iteration,
        same_noise=plan.same_noise,
    )


Images = Sequence[tuple[Tree, Tensor]]  # trees and their images (n, 3, H, W), by batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """This process's trees of a request, whose rewards, or the workers that sample, may be busy."""

    request: RolloutRequest  # of all processes
    local: RolloutRequest  # this process's R trees
    trees: Tensor  # (R,) long, their places in the request
    cond: Conditioning  # of the prompts of `local`
    wait: Callable[[Timer], tuple[Images, RewardResult]]  # for trees and scores; called once


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of all processes' G images of a request, and their rewards."""

    images: Images  # this process's
    result: RewardResult
    reward: Tensor  # (G,) fp32
    valid: Tensor  # (G,) bool
    group: Tensor  # (G,) long


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGenerator:
    """Samples, decodes and scores the images of a request, with one network and one schedule."""

    backbone: PipelineBackbone
    network: Callable[[], AbstractContextManager[VelocityField]]  # prepares the sampling network
    text_cache: TextCache
    specs: Sequence[RewardSpec]
    runtime: Runtime
    num_inference_steps: int
    kernel: StepKernel
    noise_level: float
    batch_size: int  # most rows in a forward of the network, and trees at a time
    decode_batch: int  # most rows in a forward of the decoder
    whole_prompts: bool  # one process samples all trees of a prompt
    times: tuple[str, str] = ("time/rollout", "time/reward")  # names of the timer's two laps

    def schedule(self) -> Schedule:
        sigmas = self.backbone.sigmas(self.num_inference_steps)
        return Schedule(sigmas=sigmas, kernel=self.kernel, noise_level=self.noise_level)

    def sample(
        self,
        request: RolloutRequest,
        plan: TreePlan,
        timer: Timer,
        *,
        keep: bool = True,
        stopped: Tree | None = None,
    ) -> Samples:
        """Sample and decode this process's trees; rewards score their images meanwhile.

        Args:
            request: the plan's trees for each of its groups, side by side.
            keep: return the trees and images too, not only their scores; trees that will go on
                later are returned anyway.
            stopped: this process's trees where an earlier plan stopped them, which go on; None
                samples them from noise.
        """
        trees = self.share(request, plan)
        local = request.take(trees)
        cond = self.encode_prompts(local)
        with self.runtime.raise_on_all():
            wait = self.start(request, replace(local, stopped=stopped), plan, cond, keep)
        timer.lap(self.times[0])
        return Samples(request=request, local=local, trees=trees, cond=cond, wait=wait)

    def score(self, samples: Samples, timer: Timer) -> Scores:
        """Wait for the rewards of all processes. Raises UserError: too many images have none."""
        with self.runtime.raise_on_all():
            images, result = samples.wait(timer)
        result = gather_results(result, self.runtime)
        timer.lap(self.times[1])
        request = samples.request
        group = request.group.repeat_interleave(len(result.scores) // len(request.prompt))
        reward, valid = combine(self.specs, result)
        check_invalid(valid, result.errors)
        return Scores(images=images, result=result, reward=reward, valid=valid, group=group)

    def start(
        self,
        request: RolloutRequest,
        local: RolloutRequest,
        plan: TreePlan,
        cond: Conditioning,
        keep: bool,
    ) -> Callable[[Timer], tuple[Images, RewardResult]]:
        """Sample this process's trees of the request, batch by batch; see `Samples.wait`."""
        scoring, parts = Scoring(specs=self.specs, phase="rollout"), []
        schedule, batches = self.schedule(), self.runtime.batches
        together, rows = self.batch_shape(request, plan, local.stopped)
        trees = len(local.prompt)
        turns = batches.in_step(-(-trees // together))
        # In lockstep a process without a batch samples its last one again, or the first tree.
        if turns and not trees:
            local = request.take(torch.zeros(1, dtype=torch.long))
            cond = self.encode_prompts(local)
        index = torch.arange(len(local.prompt)).split(together)
        postponed = Postponed(self.runtime)
        with torch.no_grad(), self.network() as velocity:
            for turn in range(turns):
                part = local.only(index[min(turn, len(index) - 1)])
                tree = sample_request(
                    self.backbone, velocity, cond, part, plan, schedule, rows, batches
                )
                if turn * together >= trees:
                    continue
                with postponed.block():
                    images = decode(self.backbone, tree.leaves(), self.decode_batch)
                    images = submit_images(scoring, images, part, len(tree.leaf))
                    if keep or plan.continuation is not None:
                        # Trees alone go on: a slice would hold the storage of all pixels.
                        parts.append((tree, images if keep else images.new_empty(0)))
        postponed.finish()
        return lambda timer: (parts, scoring.result())

    def share(self, request: RolloutRequest, plan: TreePlan) -> Tensor:
        """Return this process's trees of the request: (R,) long, possibly none."""
        unit = plan.roots if self.whole_prompts else 1
        return self.runtime.local_rows(len(request.prompt), unit)

    def batch_shape(
        self, request: RolloutRequest, plan: TreePlan, stopped: Tree | None
    ) -> tuple[int, int]:
        """Return the trees that are sampled together, and the rows of a call, on all processes.

        Trees that go on are called with as many rows as in their first steps.
        """
        unit = plan.roots if self.whole_prompts else 1
        most = self.runtime.largest_share(len(request.prompt), unit)
        widths = level_widths(plan)
        if plan.look_ahead is not None:  # nobody knows how many will be dropped
            widths = range(1, max(widths) + 1)
        stages = [(most, widths)]
        if plan.continuation is not None:
            trees = most // plan.roots * plan.continuation.roots
            stages.append((trees, continued_widths(plan)))
        together, rows = self.runtime.batches.trees(self.batch_size, *stages)
        return together, rows if stopped is None else stopped.rows

    @torch.no_grad()
    def encode_prompts(self, local: RolloutRequest) -> Conditioning:
        """Return the conditioning of the request's prompts, encoded together."""
        with self.runtime.autocast():
            return self.text_cache(local.prompts) if local.prompts else Conditioning(tensors={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples rollouts with the policy. All randomness is a function of seed and iteration."""

    generator: RolloutGenerator  # of the images that are learned from
    plans: TreePlan | Callable[[int], TreePlan]  # of all iterations, or a function of the iteration
    prompts: PromptSampler
    seed: int
    explorer: "Explorer | None" = None  # selects the trees among more candidates; None samples all
    rewording: "Rewording | None" = None  # of all but some trees of each prompt

    @property
    def book(self) -> PromptBook | None:
        """The book that chooses the prompts, with `prompts.book`."""
        return self.prompts if isinstance(self.prompts, PromptBook) else None

    def plan(self, iteration: int) -> TreePlan:
        """Return what is sampled for each prompt of an iteration."""
        return self.plans if isinstance(self.plans, TreePlan) else self.plans(iteration)

    def request(self, iteration: int, plan: TreePlan) -> RolloutRequest:
        """Return all processes' trees of an iteration."""
        merge = self.book is not None and self.book.options.largest_group is not None
        prompts = self.prompts.at(iteration)
        request = group_request(prompts, plan, seed=self.seed, iteration=iteration, merge=merge)
        return request if self.rewording is None else self.rewording.reword(request, plan.roots)

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Sample trees of the iteration's prompts, decode and score their images."""
        plan, explored, stopped = self.plan(iteration), None, None
        if self.explorer is None:
            request = self.request(iteration, plan)
        else:
            candidates = self.request(iteration, self.explorer.plan(iteration))
            request, explored, stopped = self.explorer.explore(
                iteration, candidates, plan.roots, timer
            )
        samples = self.generator.sample(request, plan, timer, stopped=stopped)
        return self.rollout(iteration, samples, timer, explored)

    def rollout(
        self, iteration: int, samples: Samples, timer: Timer, explored: Explored | None = None
    ) -> Rollout:
        """Return the rollout of an iteration's samples, with the scores of all processes."""
        scores = self.generator.score(samples, timer)
        tree = Tree.cat([tree for tree, _ in scores.images])
        timer.seconds |= {f"time/reward/{n}": s for n, s in scores.result.seconds.items()}
        return Rollout(
            tree=tree,
            cond=samples.cond,
            prompts=tuple(p.text for p in samples.local.prompts),
            metadata=tuple(p.metadata for p in samples.local.prompts),
            images=torch.cat([images for _, images in scores.images]),
            trees=samples.trees,
            scores=scores.result.scores,
            applicable=scores.result.applicable,
            names=scores.result.names,
            weights=torch.tensor(train_weights(self.generator.specs)),
            reward=scores.reward,
            valid=scores.valid,
            group=scores.group,
            log_prob=self.generator.runtime.gather(tree.log_prob),
            seed=learning_seed(self.seed, iteration),
            explored=explored,
            **self._expected(iteration, scores.group),
        )

    def _expected(self, iteration: int, group: Tensor) -> dict[str, Tensor]:
        """Return what the book expects of each image before it sees any; {} without a book."""
        if self.book is None:
            return {}
        estimates = torch.tensor(self.book.estimates(iteration), dtype=torch.float64)
        mean, failures = estimates[group.cpu()].unbind(1)
        return {"expected_reward": mean, "expected_failures": failures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Samples one iteration ahead of learning (`rollout.staleness: 1`).

    While an iteration is learned from, the rewards score the images of the next one, which were
    sampled with the weights of then. These are kept until they were learned from, so that a resumed
    run samples the same images again.
    """

    sampler: Sampler
    policy: Policy
    adapter: str  # that samples
    last: int  # iteration, before which the run ends
    _samples: dict[int, Samples] = field(init=False, default_factory=dict)

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Sample the next iteration, then return this one."""
        self.policy.forget_weights(before=iteration)
        samples = self._samples.pop(iteration, None)
        if samples is None:  # the first of a session
            with self.policy.weights_of(iteration, self.adapter):
                samples = self._sample(iteration, timer)
        self.policy.keep_weights(iteration + 1, self.adapter)
        if iteration + 1 < self.last:
            self._samples[iteration + 1] = self._sample(iteration + 1, timer)
        return self.sampler.rollout(iteration, samples, timer)

    def _sample(self, iteration: int, timer: Timer) -> Samples:
        plan = self.sampler.plan(iteration)
        return self.sampler.generator.sample(self.sampler.request(iteration, plan), plan, timer)


def learning_seed(seed: int, iteration: int) -> int:
    """Return the seed of the randomness in learning from an iteration's rollout."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="learn")


def sample_request(
    backbone: PipelineBackbone,
    velocity: VelocityField,
    cond: Conditioning,
    request: RolloutRequest,
    plan: TreePlan,
    schedule: Schedule,
    rows: int,
    batches: Batches = ALONE,
) -> Tree:
    """Sample the request's trees together; the network sees `rows` rows at a time.

    cond: of the request's prompts, in their order.
    """
    shape, device = backbone.latent_shape(), backbone.device
    last: Tensor | None = None
    calls: list[tuple[Tensor, Conditioning]] = []

    def field(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        nonlocal last, calls
        if prompt is not last:  # the same rows in most steps: their conditioning is gathered once
            index = [send(i, device) for i in batches.calls(len(x), rows)]
            last, calls = prompt, [(i, cond.take(prompt[i])) for i in index]
        if len(calls) == 1 and len(x) == rows:
            return velocity(x, sigma, calls[0][1])
        return torch.cat([velocity(x[i], sigma, c) for i, c in calls])[: len(x)]

    def noise(path: tuple[int, ...], step: int, role: str) -> Tensor:
        return request.noise(path, step, role, shape)

    if request.stopped is not None:
        start = request.stopped.to(device)
    else:
        start = send(noise((), 0, "init"), device).to(backbone.dtype)
    tree = sample_tree(field, start, send(request.prompt, device), plan, schedule, noise)
    return replace(tree, rows=rows)


@torch.no_grad()
def decode(backbone: PipelineBackbone, x0: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Yield the images (n, 3, H, W) fp32 in [0, 1] on the CPU of clean latents x0 (L, *latent).

    Raises SamplerFailure when the autoencoder makes no numbers of latents that are.
    """
    with backbone.autoencoder_on_device():
        for part in x0.split(batch_size):
            with phase("decode"):
                images = backbone.decode(part).cpu()
                if not images.sum().isfinite() and bool(part.isfinite().all()):
                    raise SamplerFailure(
                        "phase decode: the autoencoder makes NaN or infinite pixels of finite "
                        "latents: set pipeline.dtype to bf16 or fp32, or look at the pipeline's "
                        'files; see "The autoencoder is broken" in docs/troubleshooting.md'
                    )
            yield images


def submit_images(
    scoring: Scoring, images: Iterable[Tensor], request: RolloutRequest, leaves: int
) -> Tensor:
    """Submit images to the rewards in batches, `leaves` per tree, in the order of the request.

    Returns all images, (R * leaves, 3, H, W). Raises SamplerFailure for pixels that are not finite.
    """
    prompt, group = (t.repeat_interleave(leaves).tolist() for t in (request.prompt, request.group))
    reworded = any(p.wording is not None for p in request.prompts)
    everything: list[Tensor] = []
    start = 0
    for part in images:
        rows = slice(start, start + len(part))
        records = [request.prompts[i] for i in prompt[rows]]
        metadata = [p.metadata | ({"wording": p.encoded} if reworded else {}) for p in records]
        scoring.add(part, [p.text for p in records], metadata, group[rows])
        everything.append(part)
        start += len(part)
    return torch.cat(everything)


def gather_results(result: RewardResult, runtime: Runtime) -> RewardResult:
    """Return the scores of the images of all processes, in their order."""
    if runtime.world_size == 1:
        return result
    tensors = {
        name: runtime.gather(getattr(result, name)) for name in ("scores", "valid", "applicable")
    }
    return replace(result, **tensors, errors=runtime.merge(result.errors))


@contextmanager
def policy_velocity(
    policy: Policy, backbone: PipelineBackbone, adapter: str, *, merged: bool, runtime: Runtime
) -> Iterator[VelocityField]:
    """Sample with the policy's network and one adapter, merged into the weights or beside them."""
    # Merged before autocast begins, which would compute the change of the weights in 16 bits.
    network = policy.merged(adapter) if merged else policy.using(adapter)
    with torch.no_grad(), network, runtime.autocast():
        yield policy.stepwise(backbone.velocity)


@contextmanager
def rollout_model_velocity(
    model: RolloutModel, backbone: PipelineBackbone, adapter: str, *, runtime: Runtime
) -> Iterator[VelocityField]:
    """Sample with a copy of the network, after it took the adapter's weights as they are now.

    backbone: the one around that copy, see `with_network`.
    """
    model.sync(adapter)
    with torch.no_grad(), runtime.autocast():
        yield model.policy.stepwise(backbone.velocity)


def with_network(backbone: PipelineBackbone, network: nn.Module) -> PipelineBackbone:
    """Return the same backbone around another network of the same shape."""
    other = copy.copy(backbone)
    other.transformer = network
    return other

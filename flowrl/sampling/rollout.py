"""From prompts to a scored rollout: noise by key, the sampler, the decoder, the rewards."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.backbones.offload import decoding
from flowrl.backbones.policy import Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.functional.noise import keyed_noise, noise_seed
from flowrl.functional.sde import StepKernel
from flowrl.prompts.records import PromptRecord, reworded
from flowrl.quantization.rollout_model import RolloutModel, within_limit
from flowrl.sampling.sampler import FrontierVelocity, Schedule, grow
from flowrl.scoring.combine import FailureLimit, combine
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trajectory import Conditioning, Tree
from flowrl.trees.plan import TreePlan
from flowrl.utils.distributed import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Trees to grow: `prompts` (P), and for each of R trees its prompt, group and root number.

    prompt, group, root: (R,) long. Trees of one group are compared; they may have been asked for
    in different words, hence by different prompts of one uid. A tree depends on (seed, iteration,
    uid and words of its prompt, root), the plan and the network alone: neither on its batch, nor on
    the process that grows it; its noise not even on the words. same_noise: all roots of a prompt
    start from one noise.
    """

    prompts: Sequence[PromptRecord]
    prompt: Tensor
    group: Tensor
    root: Tensor
    seed: int
    iteration: int
    same_noise: bool = False

    def only(self, rows: Tensor) -> "RolloutRequest":
        """The trees of `rows` (N,) long, of the same list of prompts."""
        return replace(self, prompt=self.prompt[rows], group=self.group[rows], root=self.root[rows])

    def take(self, rows: Tensor) -> "RolloutRequest":
        """The trees of `rows` (N,) long, with the prompts they use."""
        used, prompt = self.prompt[rows].unique(return_inverse=True)
        prompts = [self.prompts[i] for i in used.tolist()]
        return replace(self.only(rows), prompts=prompts, prompt=prompt)

    def noise(self, path: tuple[int, ...], step: int, role: str, shape: Sequence[int]) -> Tensor:
        """One draw a tree, (R, *shape) fp32 on the CPU; path: where in the tree."""
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
    """For each prompt, how often it stood before: 0, or more for one that is repeated."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        found.append(seen[prompt.uid])
        seen[prompt.uid] += 1
    return found


def group_request(
    prompts: Sequence[PromptRecord],
    plan: TreePlan,
    *,
    seed: int,
    iteration: int,
    retained: int | None = None,
) -> RolloutRequest:
    """The plan's trees for every prompt, those of one prompt side by side: its group.

    A prompt that stands there twice is two groups, with roots of their own. retained: how many
    trees of a group keep the prompt's own words, the first; the others are asked for in the words
    of its paraphrases, where it has any. None is all. Their noise is the same either way.
    """
    if retained is not None and retained > plan.roots:
        raise ValueError(f"retained is {retained}, but a group has {plan.roots} trees")
    before = occurrences(prompts)
    asked: list[PromptRecord] = []
    place: dict[tuple[int, str | None], int] = {}  # in `asked`, by group and wording
    prompt: list[int] = []
    for group, record in enumerate(prompts):
        own = plan.roots if retained is None or not record.paraphrases else retained
        others = plan.roots - own
        turns = range(before[group] * others, (before[group] + 1) * others)
        words = [reworded(record, turn, seed=seed, iteration=iteration) for turn in turns]
        for one in [*[record] * own, *words]:
            if (group, one.wording) not in place:
                place[group, one.wording] = len(asked)
                asked.append(one)
            prompt.append(place[group, one.wording])
    first = torch.tensor(before) * plan.roots
    return RolloutRequest(
        prompts=asked,
        prompt=torch.tensor(prompt),
        group=torch.arange(len(prompts)).repeat_interleave(plan.roots),
        root=(first[:, None] + torch.arange(plan.roots)).flatten(),
        seed=seed,
        iteration=iteration,
        same_noise=plan.same_noise,
    )


def draw(
    backbone: Backbone,
    velocity: VelocityField,
    cond: Conditioning,
    request: RolloutRequest,
    plan: TreePlan,
    schedule: Schedule,
    batch_size: int,
) -> Tree:
    """Grow the request's trees as one forest; the network sees at most `batch_size` rows.

    cond: of the request's prompts, in their order.
    """
    shape, device = backbone.latent_shape(), backbone.device

    def noise(path: tuple[int, ...], step: int, role: str) -> Tensor:
        return request.noise(path, step, role, shape)

    x = noise((), 0, "init").to(device, backbone.dtype)
    prompt = request.prompt.to(device)
    return grow(batched(velocity, cond, batch_size), x, prompt, plan, schedule, noise)


def batched(velocity: VelocityField, cond: Conditioning, size: int) -> FrontierVelocity:
    """A velocity field over frontiers of any length, `size` rows at a time.

    The conditioning of a frontier is gathered once, however many steps it stays the same.
    """
    last: Tensor | None = None
    parts: list[Conditioning] = []

    def field(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        nonlocal last, parts
        if prompt is not last:
            last, parts = prompt, [cond.take(rows) for rows in prompt.split(size)]
        pieces = [velocity(xs, sigma, c) for xs, c in zip(x.split(size), parts, strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return field


@torch.no_grad()
def decode(backbone: Backbone, x0: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Clean latents (L, *latent) -> images (n, 3, H, W) fp32 in [0, 1] on the CPU, n at a time.

    An autoencoder that is kept elsewhere is on the backbone's device in the meantime.
    """
    with decoding(backbone):
        for part in x0.split(batch_size):
            yield backbone.decode(part).cpu()


def hand_in(
    scoring: Scoring, images: Iterable[Tensor], request: RolloutRequest, leaves: int
) -> Tensor:
    """Images to the rewards as they come, `leaves` of each tree in the request's order.

    -> all of them, (R * leaves, 3, H, W). Raises SamplerFailure for images that are not finite.
    """
    prompt, group = (t.repeat_interleave(leaves).tolist() for t in (request.prompt, request.group))
    found: list[Tensor] = []
    start = 0
    for part in images:
        rows = slice(start, start + len(part))
        asked = [request.prompts[i] for i in prompt[rows]]
        scoring.add(part, [p.text for p in asked], [p.metadata for p in asked], group[rows])
        found.append(part)
        start += len(part)
    return torch.cat(found)


def gathered(result: RewardResult, runtime: Runtime) -> RewardResult:
    """The scores of the images of all processes, in their order."""
    if runtime.world_size == 1:
        return result
    tensors = {
        name: runtime.gather(getattr(result, name)) for name in ("scores", "valid", "applicable")
    }
    return replace(result, **tensors, errors=runtime.merge(result.errors))


class Stopwatch:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def note(self, seconds: dict[str, float]) -> None:
        """What was measured elsewhere."""
        self.seconds |= seconds


# --- One way to make scored images: a network in some precision, a schedule, rewards ---------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrees:
    """This process's share of a request, and the scores of all processes' images.

    own: its trees, of which `trees` (R,) long are the places in the whole request; cond: of the
    prompts of `own`. parts: trees and images (n, 3, H, W) as they were drawn, unless they were
    dropped. result: of all G images; reward, valid (G,) and terms (G, K): see `combine`; group
    (G,) long.
    """

    own: RolloutRequest
    trees: Tensor
    cond: Conditioning
    parts: Sequence[tuple[Tree, Tensor]]
    result: RewardResult
    reward: Tensor
    valid: Tensor
    terms: Tensor
    group: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGenerator:
    """Draws, decodes and scores what it is asked for.

    network: makes a context in which the network stands as it draws, and gives its velocity.
    steps, kernel, level: the schedule and its noise. batch_size: most rows in a forward;
    decode_batch: in the decoder. whole_prompts: all trees of a prompt are drawn by one process.
    times: names of the seconds spent drawing, and then waiting for scores.
    """

    backbone: Backbone
    network: Callable[[], AbstractContextManager[VelocityField]]
    encode: TextCache
    specs: Sequence[RewardSpec]
    runtime: Runtime
    failures: FailureLimit
    steps: int
    kernel: StepKernel
    level: float
    batch_size: int
    decode_batch: int
    whole_prompts: bool
    times: tuple[str, str] = ("time/rollout", "time/reward")

    def schedule(self) -> Schedule:
        sigmas = self.backbone.sigmas(self.steps)
        return Schedule(sigmas=sigmas, kernel=self.kernel, level=self.level)

    def __call__(
        self, request: RolloutRequest, plan: TreePlan, watch: Stopwatch, *, keep: bool = True
    ) -> ScoredTrees:
        """Grow this process's share of the request's trees, and learn all processes' scores.

        The request has the plan's trees for each of its groups, side by side. keep: whether the
        trees and images are wanted, or only their scores. Raises UserError when too many
        images have no reward.
        """
        trees = self.share(request, plan)
        own = request.take(trees)
        cond = self.read(own)
        scoring, parts = Scoring(specs=self.specs), []
        with self.runtime.together():
            for part in self._draw(own, plan, cond, scoring):
                if keep:
                    parts.append(part)
            watch.lap(self.times[0])
            result = scoring.result()
        result = gathered(result, self.runtime)
        watch.lap(self.times[1])
        group = request.group.repeat_interleave(len(result.scores) // len(request.prompt))
        reward, valid, terms = combine(self.specs, result, group)
        self.failures.check(valid, result.errors)
        return ScoredTrees(
            own=own, trees=trees, cond=cond, parts=parts, result=result, reward=reward,
            valid=valid, terms=terms, group=group,
        )  # fmt: skip

    def share(self, request: RolloutRequest, plan: TreePlan) -> Tensor:
        """This process's trees of the request: (R,) long, none where others take them all."""
        unit = plan.roots if self.whole_prompts else 1
        return self.runtime.share(len(request.prompt), unit)

    @torch.no_grad()
    def read(self, own: RolloutRequest) -> Conditioning:
        """The texts of this process's trees, encoded at once."""
        with self.runtime.autocast():
            return self.encode(own.prompts) if own.prompts else Conditioning(tensors={})

    def _draw(
        self, own: RolloutRequest, plan: TreePlan, cond: Conditioning, scoring: Scoring
    ) -> Iterator[tuple[Tree, Tensor]]:
        """Trees and their images, which rewards get as soon as they are decoded.

        A batch of roots at a time, which makes batches as full as all at once: whatever the width
        of a tree at some step, so many of them make whole batches.
        """
        if not len(own.prompt):
            return
        schedule = self.schedule()
        with torch.no_grad(), self.network() as velocity:
            for rows in torch.arange(len(own.prompt)).split(self.batch_size):
                part = own.only(rows)
                tree = draw(self.backbone, velocity, cond, part, plan, schedule, self.batch_size)
                images = decode(self.backbone, tree.leaves(), self.decode_batch)
                yield tree, hand_in(scoring, images, part, len(tree.leaf))


# --- The network as a stage draws with it: the policy's own, or a copy made for drawing --------


@contextmanager
def policys_own(
    policy: Policy, backbone: Backbone, adapter: str, *, merged: bool, runtime: Runtime
) -> Iterator[VelocityField]:
    """The policy's network with one adapter, folded into the weights or beside them."""
    # Folded before autocast begins, which would compute the change of the weights in 16 bits.
    network = policy.merged(adapter) if merged else policy.using(adapter)
    with torch.no_grad(), network, runtime.autocast():
        yield backbone.velocity


@contextmanager
def of_twin(
    twin: RolloutModel, backbone: Backbone, adapter: str, *, runtime: Runtime
) -> Iterator[VelocityField]:
    """A copy, once it has learned what the adapter is by now. backbone: with the copy inside."""
    twin.sync(adapter)
    with torch.no_grad(), runtime.autocast(), within_limit():
        yield backbone.velocity


def with_network(backbone: Backbone, network: nn.Module) -> Backbone:
    """The same pipeline around another network of the same shape."""
    other = copy.copy(backbone)
    other.transformer = network
    return other

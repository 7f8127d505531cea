"""Evaluation: score images of the same held-out prompts and noise before and after training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.backbones.offload import encoders_of, moved_to
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import DamagedFile, UserError
from flowrl.functional.full_batches import even_rows
from flowrl.prompts.records import PromptRecord, reworded
from flowrl.sampling.rollout import (
    RolloutRequest,
    decode,
    gather_results,
    occurrences,
    sample_request,
    submit_images,
)
from flowrl.sampling.sampler import Schedule
from flowrl.scoring.combine import check_invalid, check_scores, lacks_score
from flowrl.scoring.executors.base import to_levels
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trees.plan import ode_plan
from flowrl.utils.distributed import Postponed, Runtime
from flowrl.utils.files import load_state, save_state
from flowrl.utils.progress import SafeConsole, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and the interval that holds it at the stated level."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    before: Tensor,
    after: Tensor,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap of mean(after - before), pairs kept together (Efron, 1979).

    before, after: (N,), scores of the same prompts and seeds. The same input gives the same
    interval. Raises ValueError for unequal shapes, no pairs, or scores that are not finite.
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) == 0:
        raise ValueError(
            f"paired scores have shapes {tuple(before.shape)} and {tuple(after.shape)}; "
            "expected two equal, non-empty vectors"
        )
    change = after.cpu().double() - before.cpu().double()
    if not bool(change.isfinite().all()):
        raise ValueError("paired scores must be finite: drop a pair when either score is missing")
    generator = torch.Generator().manual_seed(seed)
    n = len(change)
    # One resample at a time: all of them at once would take gigabytes for a large evaluation.
    means = torch.stack(
        [change[torch.randint(n, (n,), generator=generator)].mean() for _ in range(resamples)]
    )
    low, high = means.quantile(means.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return Interval(mean=change.mean().item(), low=low, high=high)


Score = TypeVar("Score", float, Tensor)

NO_ITERATION = -1  # in the keys of noise: no training iteration uses it
QUALITY_BOUNDS = (1.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of N images by R rewards, and the first n images for people to look at."""

    scores: Tensor  # (N, R) fp32, NaN where missing or not applicable
    names: tuple[str, ...]  # R
    images: Tensor  # (n, 3, H, W) uint8
    prompts: tuple[str, ...]  # n
    draws: tuple[int, ...]  # n, each image's number among those of its prompt
    key: str  # of the evaluator; only evaluations with one key can be compared
    # (N, R) scores of images from the same noise and a paraphrase of the prompt, NaN where it has
    # none; None when they were not generated.
    reworded: Tensor | None = None
    steps: int = 0  # denoising steps of an image; 0 where an earlier version did not say
    others: tuple["Evaluation", ...] = ()  # the same at other numbers of steps

    def mean(self, name: str) -> float:
        """Return the mean of one reward over the images that have it, NaN when none has."""
        return self.scores[:, self.names.index(name)].nanmean().item()

    def measures(self, quality: str | None = None) -> dict[str, Tensor]:
        """Return all measured values by name, (N,) each, NaN where an image has none.

        Beside the rewards: corrected/<name>, see `corrected_score`, when `quality` names the reward
        on 1 to 5; paraphrase/<name>, the score of the image from a paraphrase;
        paraphrase_gap/<name>, how far that is below the score with the prompt's own words; and
        <n>_steps/<name>, each of these at another number of denoising steps.
        """
        found = dict(zip(self.names, self.scores.unbind(1), strict=True))
        columns = () if self.reworded is None else self.reworded.unbind(1)
        others = dict(zip(self.names, columns, strict=False))  # none, or all
        judged = None if quality is None else found.get(quality)
        corrected = {
            f"corrected/{name}": corrected_score(score, judged)
            for name, score in found.items()
            if judged is not None and name != quality
        }
        paraphrase = {f"paraphrase/{name}": score for name, score in others.items()}
        gap = {f"paraphrase_gap/{name}": found[name] - score for name, score in others.items()}
        at_others = {
            f"{other.steps}_steps/{name}": values
            for other in self.others
            for name, values in other.measures(quality).items()
        }
        return found | corrected | paraphrase | gap | at_others

    def save(self, path: Path) -> None:
        save_state(path, self._state())

    @staticmethod
    def load(path: Path) -> "Evaluation":
        """Raises DamagedFile for a file that is not what `save` wrote."""
        state = load_state(path)
        try:
            return Evaluation._from_state(state)
        except (TypeError, KeyError, AttributeError) as error:
            raise DamagedFile(f"{path} is no evaluation: {error}") from error

    def _state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__slots__}
        return state | {"others": [other._state() for other in self.others]}

    @staticmethod
    def _from_state(state: dict[str, Any]) -> "Evaluation":
        for name in ("names", "prompts", "draws"):
            state[name] = tuple(state[name])
        state["others"] = tuple(map(Evaluation._from_state, state.get("others", ())))
        return Evaluation(**state)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComparison:
    """One measure before and after, over the pairs of images that have both scores."""

    name: str
    before: float
    after: float
    change: Interval
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The pipeline's own call, pipe(prompt, ...), with its own scheduler and its own dtype.

    settings: arguments of the call, but for prompts, number of steps and noise. negative: the
    negative prompt of prompts that bring none, used if guidance > 1.
    """

    settings: Mapping[str, Any]
    negative: str = ""

    def __call__(
        self, backbone: Backbone, prompts: Sequence[PromptRecord], noise: Tensor, steps: int
    ) -> Tensor:
        """Return the images (B, 3, H, W) fp32 on the CPU from initial noise (B, *latent)."""
        call: dict[str, Any] = {**self.settings, "num_inference_steps": steps}
        negatives = [self.negative if p.negative is None else p.negative for p in prompts]
        if call.get("guidance_scale", 0) > 1 and any(negatives):
            call["negative_prompt"] = negatives
        pipeline, device = backbone.pipeline, backbone.device
        parts = [*encoders_of(pipeline), pipeline.vae]
        with moved_to(parts, device), without_progress(pipeline):
            # Not in the autocast of training, which a user's own call does not have either.
            with torch.autocast(device.type, enabled=False):
                latents = noise.to(device, backbone.dtype)
                read = [p.read for p in prompts]
                images = pipeline(read, latents=latents, output_type="pt", **call).images
        return images.float().clamp(0, 1).cpu()


@contextmanager
def without_progress(pipeline: Any) -> Iterator[None]:
    """Hide the progress bar of a pipeline's call inside the block."""
    before = dict(getattr(pipeline, "_progress_bar_config", {}))
    pipeline.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipeline.set_progress_bar_config(**before)


def evaluation_file(folder: Path, step: int) -> Path:
    """Return where a run keeps what was measured after an iteration."""
    return folder / "evaluations" / f"step-{step:06d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Generates and scores one image of each of `prompts`, deterministically over `schedule`.

    The k-th image of a prompt always has the same initial noise, also over the other `schedules`
    and in the pipeline's own call. Raises RewardFailure when more than `max_invalid_fraction` of
    the images lack a score of a trained reward.
    """

    backbone: Backbone
    text_cache: TextCache
    prompts: Sequence[PromptRecord]
    specs: Sequence[RewardSpec]
    schedule: Schedule
    others: Sequence[Schedule] = ()  # with other numbers of steps, for whole evaluations
    call: PipelineCall | None = None  # in place of the schedules' steps; their number stays
    seed: int
    batch_size: int
    decode_batch: int
    key: str = ""  # of everything that decides the base's images and their scores
    keep: int = 24  # images kept for people to look at
    quality: str | None = None  # the reward on 1 to 5 that corrects the others
    # Generate each image whose prompt has paraphrases again, from the same noise and one of them.
    paraphrases: bool = False
    max_invalid_fraction: float = 1.0

    def request(self) -> RolloutRequest:
        return RolloutRequest(
            prompts=self.prompts,
            prompt=torch.arange(len(self.prompts)),
            group=torch.arange(len(self.prompts)),
            root=torch.tensor(occurrences(self.prompts)),
            seed=self.seed,
            iteration=NO_ITERATION,
        )

    def __call__(
        self, velocity: VelocityField, runtime: Runtime, *, whole: bool = True
    ) -> Evaluation:
        """Score the network behind `velocity`; return the result on every process.

        whole: over all schedules, not over the first alone.
        """
        if whole and self.others:
            each = [replace(self, schedule=s, others=()) for s in (self.schedule, *self.others)]
            first, *others = [evaluator(velocity, runtime) for evaluator in each]
            return replace(first, others=tuple(others))
        request = self.request()
        scores, images = self._generate(velocity, runtime, request, keep=self.keep)
        shown = range(min(self.keep, len(self.prompts)))
        return Evaluation(
            scores=scores,
            names=tuple(spec.name for spec in self.specs),
            images=images,
            prompts=tuple(self.prompts[i].text for i in shown),
            draws=tuple(request.root[: len(shown)].tolist()),
            key=self.key,
            reworded=self._reworded(velocity, runtime, request) if self.paraphrases else None,
            steps=len(self.schedule.sigmas) - 1,
        )

    def _reworded(
        self, velocity: VelocityField, runtime: Runtime, request: RolloutRequest
    ) -> Tensor:
        """Return the scores (N, R) of the images from paraphrases."""
        has = torch.tensor([bool(p.paraphrases) for p in self.prompts])
        rows = has.nonzero().squeeze(1)
        scores = torch.full((len(has), len(self.specs)), torch.nan)
        if not len(rows):
            return scores
        words = [
            reworded(p, turn, seed=self.seed, iteration=NO_ITERATION) if p.paraphrases else p
            for p, turn in zip(self.prompts, request.root.tolist(), strict=True)
        ]
        asked = replace(request, prompts=words).take(rows)
        scores[rows] = self._generate(velocity, runtime, asked, keep=0)[0]
        return scores

    @torch.no_grad()
    def _generate(
        self, velocity: VelocityField, runtime: Runtime, request: RolloutRequest, *, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Return the scores (N, R) of all images and the first `keep`, the same on every process.

        Rewards work on a batch while the next is generated; no more than that wait.
        """
        results, kept = [Scoring(specs=self.specs, phase="evaluation").result()], []
        waiting: list[Scoring] = []
        own, postponed = runtime.local_rows(len(request.prompt)), Postponed(runtime)
        size = even_rows(runtime.largest_share(len(request.prompt)), self.batch_size)
        rounds = runtime.rounds(-(-len(own) // size))
        steps = (
            Steps("evaluating", rounds, console=SafeConsole(stderr=True))
            if runtime.is_main
            else None
        )
        with runtime.raise_on_all(), steps or nullcontext():
            # All at once, so that offloaded encoders move once.
            prompts = [request.prompts[i] for i in request.prompt[own].tolist()]
            if self.call is None:
                self.text_cache.learn(prompts, self.batch_size)
            # In lockstep a process without a batch generates its last one again, or the first.
            batches = (own if len(own) else torch.zeros(1, dtype=torch.long)).split(size)
            for turn in range(rounds):
                rows = batches[min(turn, len(batches) - 1)]
                asked, scoring = request.take(rows), Scoring(specs=self.specs, phase="evaluation")
                with runtime.autocast():
                    images = self.images(velocity, asked, size, runtime.rounds)
                if turn * size >= len(own):
                    continue
                with postponed.block(), runtime.autocast():
                    kept.append(to_levels(submit_images(scoring, images, asked, 1)[rows < keep]))
                    waiting.append(scoring)
                    if len(waiting) > 1:
                        results.append(waiting.pop(0).result())
                if steps is not None:
                    steps.advance()
            postponed.finish()
            results += [scoring.result() for scoring in waiting]
        result = gather_results(RewardResult.cat(results), runtime)
        check_scores(self.specs, result)
        # Means over the few images that have a score would mislead.
        known = ~lacks_score(self.specs, result)
        check_invalid(known, max_invalid_fraction=self.max_invalid_fraction, errors=result.errors)
        return result.scores, runtime.gather(torch.cat(kept) if kept else self._no_images())

    def images(
        self,
        velocity: VelocityField,
        request: RolloutRequest,
        rows: int | None = None,
        rounds: Callable[[int], int] = int,
    ) -> Iterable[Tensor]:
        """Generate a batch: images (n, 3, H, W) fp32 on the CPU, part by part.

        Args:
            rows: of each call of the network, None for `batch_size`.
            rounds: see `Runtime.rounds`.
        """
        rows = rows or min(self.batch_size, len(request.prompt))
        steps = len(self.schedule.sigmas) - 1
        if self.call is not None:
            noise = request.noise((), 0, "init", self.backbone.latent_shape())
            asked = [request.prompts[i] for i in request.prompt.tolist()]
            return self.call(self.backbone, asked, noise, steps).split(self.decode_batch)
        plan, cond = ode_plan(steps), self.text_cache(request.prompts)
        tree = sample_request(
            self.backbone, velocity, cond, request, plan, self.schedule, rows, rounds
        )
        return decode(self.backbone, tree.leaves(), self.decode_batch)

    def _no_images(self) -> Tensor:
        """Return (0, 3, H, W) uint8, for a process that has no images to gather."""
        latent = torch.zeros(1, *self.backbone.latent_shape(), device=self.backbone.device)
        return next(decode(self.backbone, latent, 1))[:0].to(torch.uint8)


def compare(
    before: Evaluation, after: Evaluation, quality: str | None = None
) -> list[EvaluationComparison]:
    """Compare what both evaluations measure, image by image, with 95 % bootstrap intervals.

    quality: as in `Evaluation.measures`. A measure without a pair is left out.
    """
    rows = []
    others = after.measures(quality)
    for name, a in before.measures(quality).items():
        b = others.get(name, torch.full_like(a, torch.nan))
        both = a.isfinite() & b.isfinite()
        if not bool(both.any()):
            continue
        a, b = a[both], b[both]
        rows.append(
            EvaluationComparison(
                name=name,
                before=a.mean().item(),
                after=b.mean().item(),
                change=paired_bootstrap(a, b),
                pairs=len(a),
            )
        )
    return rows


def table(rows: Sequence[EvaluationComparison]) -> list[dict[str, Any]]:
    """Return a comparison as the rows of a table."""
    return [
        {
            "reward": row.name,
            "base": row.before,
            "aligned": row.after,
            "change": row.change.mean,
            "95% low": row.change.low,
            "95% high": row.change.high,
            "images": row.pairs,
        }
        for row in rows
    ]


def corrected_score(
    reward: Score, quality: Score, pivot: float = 3.0, offset: float = 0.2
) -> Score:
    """Return reward (quality - pivot) + offset (GDRO, 2601.02036), quality being on 1 to 5.

    Below the pivot it falls as the reward rises. Pivot and offset have no derivation: look at raw
    reward and quality, too. NaN stays NaN.
    """
    return reward * (quality - pivot) + offset


def check_quality(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], name: str) -> None:
    """Raise UserError unless evaluation.quality names a reward from 1 to 5."""
    spec = named_reward(specs, prompts, name, "evaluation.quality")
    bounds = getattr(spec.reward, "bounds", None)
    if bounds is None or tuple(bounds) != QUALITY_BOUNDS:
        raise UserError(
            f"evaluation.quality is {name!r}, whose bounds are {bounds}, but the corrected score "
            "is made for a quality from 1 to 5: name a reward with bounds = (1.0, 5.0), for "
            "example tiny_quality"
        )


def named_reward(
    specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], name: str, option: str
) -> RewardSpec:
    """Return the reward that `option` names.

    Raises UserError when there is none, or when it applies to none of the held-out prompts.
    """
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None:
        known = ", ".join(spec.name for spec in specs)
        raise UserError(f"{option} is {name!r}, expected the name of a reward of this run: {known}")
    if not spec.asked_in("evaluation"):
        raise UserError(
            f"{option} is {name!r}, whose option when is rollout, so that no evaluation asks it: "
            "set that to both"
        )
    if spec.whole_groups:
        raise UserError(
            f"{option} is {name!r}, which compares the images of a prompt, and evaluation makes "
            "one image at a time: name a reward that looks at single images"
        )
    if not any(spec.applies(p.text, p.metadata) for p in prompts):
        raise UserError(
            f"{option} is {name!r}, but that reward applies to none of the {len(prompts)} held-out "
            "prompts: give evaluation.prompts that it can judge, or set it to null"
        )
    return spec

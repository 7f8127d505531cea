"""Score images of the same held-out prompts and noise before, during and after training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.backbones.gate import Visit, call_through
from flowrl.backbones.offload import encoders_of, moved_to
from flowrl.backbones.pipeline import PipelineBackbone, images_of
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import DamagedFile
from flowrl.functional.batches import Batches, even_rows
from flowrl.functional.contrasts import Contrast, paired_contrast
from flowrl.functional.image_statistics import STATISTICS, image_statistics, thumbnails
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import (
    RolloutRequest,
    decode,
    gather_results,
    occurrences,
    sample_request,
    submit_images,
)
from flowrl.sampling.sampler import Schedule
from flowrl.scoring.combine import check_invalid, lacks_score
from flowrl.scoring.executors.base import to_levels
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trees.plan import ode_plan
from flowrl.utils.distributed import Postponed, Runtime
from flowrl.utils.files import load_state, save_state
from flowrl.utils.progress import SafeConsole, Steps

NO_ITERATION = -1  # in the keys of noise: no training iteration uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of N images by R rewards, and the first n images for people to look at."""

    scores: Tensor  # (N, R) fp32, NaN where missing or not applicable
    names: tuple[str, ...]  # R
    images: Tensor  # (n, 3, H, W) uint8
    prompts: tuple[str, ...]  # n
    draws: tuple[int, ...]  # n, each image's number among those of its prompt
    key: str  # of the evaluator; only evaluations with one key can be compared
    origin: str = ""  # of the evaluator: weights, libraries and device
    prompt: Tensor  # (N,) long, equal for images of one prompt: intervals resample prompts
    statistics: Tensor  # (N, S) fp32, see `image_statistics`
    thumbnails: Tensor  # (N, 3, h, w) fp32, of all images
    steps: int = 0  # denoising steps of an image; 0: not recorded
    rows: int = 0  # of each call of the network, which decide the last bits; 0: not recorded
    at_steps: tuple["Evaluation", ...] = ()  # the same at other numbers of steps
    errors: tuple[str, ...] = ()  # why scores are missing, a sentence for each reward

    def mean(self, name: str) -> float:
        """Return the mean of one reward over the images that have it, NaN when none has."""
        return self.scores[:, self.names.index(name)].nanmean().item()

    def measures(self) -> dict[str, Tensor]:
        """Return all measured values by name, (N,) each, NaN where an image has none.

        Beside the rewards: <n>_steps/<name>, each of these at another number of denoising steps.
        """
        measures = dict(zip(self.names, self.scores.unbind(1), strict=True))
        for other in self.at_steps:
            for name, values in other.measures().items():
                measures[f"{other.steps}_steps/{name}"] = values
        return measures

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
        return state | {"at_steps": [other._state() for other in self.at_steps]}

    @staticmethod
    def _from_state(state: dict[str, Any]) -> "Evaluation":
        for name in ("names", "prompts", "draws", "errors"):
            state[name] = tuple(state[name])
        state["at_steps"] = tuple(map(Evaluation._from_state, state["at_steps"]))
        return Evaluation(**state)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComparison:
    """One measure before and after, over the images that have both scores."""

    name: str
    before: float
    after: float
    change: Contrast


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The pipeline's own call, pipe(prompt, ...), with its own scheduler and its own dtype.

    arguments: of the call, but for prompts, number of steps and noise. negative: for prompts that
    bring no negative prompt of their own, used where guidance is on.
    """

    arguments: Mapping[str, Any]
    negative: str = ""

    def __call__(
        self, backbone: PipelineBackbone, prompts: Sequence[PromptRecord], noise: Tensor, steps: int
    ) -> Tensor:
        """Return the images (B, 3, H, W) fp32 on the CPU from initial noise (B, *latent)."""
        call: dict[str, Any] = {**self.arguments, "num_inference_steps": steps}
        if "negative_prompt" in call:
            negatives = [self.negative if p.negative is None else p.negative for p in prompts]
            call["negative_prompt"] = negatives
        pipeline, device = backbone.pipeline, backbone.device
        parts = [*encoders_of(pipeline), pipeline.vae]
        with moved_to(parts, device):
            # Not in the autocast of training, which a user's own call does not have either.
            with torch.autocast(device.type, enabled=False):
                visit = Visit(latents=noise.to(device, backbone.dtype))
                call |= {"prompt": [p.encoded for p in prompts], "output_type": "pt"}
                if hasattr(pipeline, "prepare_latents"):  # whose result `visit` replaces
                    call["generator"] = torch.Generator().manual_seed(0)
                else:
                    call["latents"] = visit.latents
                with torch.no_grad():
                    result = call_through(pipeline, visit, device, call)
        return images_of(result).float().clamp(0, 1).cpu()


def evaluation_file(folder: Path, step: int) -> Path:
    """Return where a run keeps what was measured after an iteration."""
    return folder / "evaluations" / f"step-{step:06d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Generates and scores one image of each of `prompts`, deterministically over `schedule`.

    The k-th image of a prompt always has the same initial noise, also at other numbers of steps
    and in the pipeline's own call. Raises RewardFailure when too many images lack a
    score of a trained reward.
    """

    backbone: PipelineBackbone
    text_cache: TextCache
    prompts: Sequence[PromptRecord]
    specs: Sequence[RewardSpec]
    schedule: Schedule
    at_steps: Sequence[Schedule] = ()  # other numbers of steps, for whole evaluations
    call: PipelineCall | None = None  # in place of the schedules' steps; their number stays
    seed: int
    batch_size: int
    decode_batch: int
    key: str = ""  # of everything in the recipe that decides the base's images and their scores
    origin: str = ""  # of what else does, see `evaluation_origin`; "": no other run may have these
    keep: int = 24  # images kept for people to look at

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
        self, velocity: VelocityField, runtime: Runtime, of: str = "", *, whole: bool = True
    ) -> Evaluation:
        """Score the network behind `velocity`; return the result on every process.

        Args:
            of: what is evaluated, for the progress bar.
            whole: over all schedules, not over the first alone.
        """
        if whole and self.at_steps:
            each = [replace(self, schedule=s, at_steps=()) for s in (self.schedule, *self.at_steps)]
            first, *rest = [evaluator(velocity, runtime, of) for evaluator in each]
            return replace(first, at_steps=tuple(rest))
        request = self.request()
        scores, looks, images, errors = self._generate(velocity, runtime, request, of)
        shown = range(min(self.keep, len(self.prompts)))
        return Evaluation(
            scores=scores,
            names=tuple(spec.name for spec in self.specs),
            images=images,
            prompts=tuple(self.prompts[i].text for i in shown),
            draws=tuple(request.root[: len(shown)].tolist()),
            key=self.key,
            origin=self.origin,
            prompt=prompt_numbers(self.prompts),
            statistics=looks[0],
            thumbnails=looks[1],
            steps=len(self.schedule.sigmas) - 1,
            rows=even_rows(runtime.largest_share(len(self.prompts)), self.batch_size),
            errors=tuple(f"{name}: {reason}" for name, reason in errors.items()),
        )

    @torch.no_grad()
    def _generate(
        self, velocity: VelocityField, runtime: Runtime, request: RolloutRequest, of: str
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Mapping[str, str]]:
        """Return scores (N, R), looks, the images to keep and why scores are missing.

        Looks are the statistics (N, S) and thumbnails (N, 3, h, w) of all images.

        All processes return the same.

        Rewards score a batch while the next is generated; no more than one batch waits.
        """
        results, shown = [Scoring(specs=self.specs, phase="evaluation").result()], []
        none, period = torch.empty(0, 3, *self.backbone.image_size()), decoder_period(self.backbone)
        looks = [(none.new_empty(0, len(STATISTICS)), thumbnails(none))]
        waiting: list[Scoring] = []
        share, postponed = runtime.local_rows(len(request.prompt)), Postponed(runtime)
        size = even_rows(runtime.largest_share(len(request.prompt)), self.batch_size)
        turns = runtime.batches.in_step(-(-len(share) // size))
        title = f"{f'evaluating {of}'.rstrip()}, {len(self.schedule.sigmas) - 1} steps"
        console = SafeConsole(stderr=True)
        steps = Steps(title, turns, console=console, show=runtime.is_main)
        with runtime.raise_on_all(), steps:
            # In lockstep a process without a batch generates its last one again, or the first.
            batches = (share if len(share) else torch.zeros(1, dtype=torch.long)).split(size)
            for turn in range(turns):
                rows = batches[min(turn, len(batches) - 1)]
                batch, scoring = request.take(rows), Scoring(specs=self.specs, phase="evaluation")
                with runtime.autocast():
                    images = self.images(velocity, batch, size, runtime.batches)
                if turn * size >= len(share):
                    continue
                with postponed.block(), runtime.autocast():
                    made = submit_images(scoring, images, batch, 1)
                    looks.append((image_statistics(made, period), thumbnails(made)))
                    shown.append(to_levels(made[rows < self.keep]))
                    waiting.append(scoring)
                    if len(waiting) > 1:
                        results.append(waiting.pop(0).result())
                steps.advance()
            postponed.finish()
            results += [scoring.result() for scoring in waiting]
        result = gather_results(RewardResult.cat(results), runtime)
        # Means over the few images that have a score would mislead.
        scored = ~lacks_score(self.specs, result)
        check_invalid(scored, result.errors)
        images = runtime.gather(torch.cat(shown) if shown else to_levels(none))
        statistics, small = (runtime.gather(torch.cat(parts)) for parts in zip(*looks, strict=True))
        return result.scores, (statistics, small), images, result.errors

    def images(
        self,
        velocity: VelocityField,
        request: RolloutRequest,
        rows: int,
        calls: Batches,
    ) -> Iterable[Tensor]:
        """Generate a batch: images (n, 3, H, W) fp32 on the CPU, part by part.

        Args:
            rows: of each call of the network.
            calls: `Runtime.batches`.
        """
        steps = len(self.schedule.sigmas) - 1
        if self.call is not None:
            noise = request.noise((), 0, "init", self.backbone.latent_shape())
            prompts = [request.prompts[i] for i in request.prompt.tolist()]
            return self.call(self.backbone, prompts, noise, steps).split(self.decode_batch)
        plan, cond = ode_plan(steps), self.text_cache(request.prompts)
        tree = sample_request(
            self.backbone, velocity, cond, request, plan, self.schedule, rows, calls
        )
        return decode(self.backbone, tree.leaves(), self.decode_batch)


def decoder_period(backbone: PipelineBackbone) -> int:
    """Return the pixels a side of what the network and the decoder treat alike: a token's."""
    shape, (height, width) = backbone.latent_shape(), backbone.image_size()
    if len(shape) == 2:  # (tokens, channels)
        return round((height * width / shape[0]) ** 0.5)
    patch = getattr(getattr(backbone.transformer, "config", None), "patch_size", None) or 1
    return height // shape[-2] * (patch if isinstance(patch, int) else patch[-1])


def prompt_numbers(prompts: Sequence[PromptRecord]) -> Tensor:
    """Return a number (N,) long for each prompt, equal for equal ones."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(p.uid, len(numbers)) for p in prompts])


def compare(before: Evaluation, after: Evaluation) -> list[EvaluationComparison]:
    """Compare what both evaluations measure, image by image, with 95 % intervals over prompts.

    A measure without a pair is left out.
    """
    rows, measures = [], after.measures()
    for name, a in before.measures().items():
        b = measures.get(name, torch.full_like(a, torch.nan))
        both = a.isfinite() & b.isfinite()
        if bool(both.any()):
            rows.append(
                EvaluationComparison(
                    name=name,
                    before=a[both].mean().item(),
                    after=b[both].mean().item(),
                    change=paired_contrast(a, b, before.prompt),
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
            "images": row.change.images,
            "prompts": row.change.prompts,
        }
        for row in rows
    ]

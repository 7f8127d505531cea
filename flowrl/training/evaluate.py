"""Is it better? The same held-out prompts and seeds before and after, scored and compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.functional.groups import Interval, paired_bootstrap
from flowrl.prompts.records import PromptRecord, reworded
from flowrl.sampling.rollout import RolloutRequest, decode, draw, gathered, hand_in, occurrences
from flowrl.sampling.sampler import Schedule
from flowrl.scoring.combine import check_invalid, lacking
from flowrl.scoring.executors.base import to_levels
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trees.plan import ode_plan
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, save_state

# --- Is the policy improving, or only pleasing its reward? -------------------------------------

Score = TypeVar("Score", float, Tensor)


def corrected_score(
    reward: Score, quality: Score, pivot: float = 3.0, offset: float = 0.2
) -> Score:
    """GDRO's (2601.02036) reward (quality - pivot) + offset: a reward counts where quality does.

    quality: of UnifiedReward, 1 to 5. Below the pivot it falls as the reward rises; pivot and
    offset have no derivation, so that raw reward and quality belong beside it. NaN stays NaN.
    """
    return reward * (quality - pivot) + offset


def is_hacking(
    trained: Sequence[float], held_out: Sequence[float], patience: int, *, margin: float = 0.0
) -> bool:
    """Whether the trained score has gone on rising at the cost of one that is not trained.

    Both are scores of the same evaluations in order; where either is NaN the evaluation counts
    nowhere. Let b be the latest evaluation with the best held-out score. True when each of the
    last `patience` evaluations comes after b, has a trained score above that at b, and a held-out
    score more than `margin` below that at b. Raises ValueError for unequal lengths, a patience
    below 1 or a negative margin.
    """
    if len(trained) != len(held_out):
        raise ValueError(f"got {len(trained)} trained and {len(held_out)} held-out scores")
    if patience < 1 or margin < 0:
        raise ValueError(
            f"patience is {patience} and margin {margin}: at least 1, and not negative"
        )
    both = zip(trained, held_out, strict=True)
    seen = [pair for pair in both if not any(map(math.isnan, pair))]
    if len(seen) <= patience:
        return False
    best = max(range(len(seen)), key=lambda i: (seen[i][1], i))
    if best >= len(seen) - patience:
        return False
    reward, quality = seen[best]
    return all(r > reward and q < quality - margin for r, q in seen[-patience:])


# --- Is it better? The same held-out prompts and seeds before and after, scored and compared ---

NO_ITERATION = -1  # in the names of noise: no training iteration draws it
QUALITY_BOUNDS = (1.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of N images: scores (N, R), NaN where missing or not applicable, and the R names.

    images: (n, 3, H, W) uint8, the first n of them; prompts, draws: of those n. key: the
    evaluator's; only evaluations with one key can be compared. reworded: (N, R), scores of as many
    images from the same noise and a paraphrase of the prompt, NaN where it has none; None when
    they were not drawn.
    """

    scores: Tensor
    names: tuple[str, ...]
    images: Tensor
    prompts: tuple[str, ...]
    draws: tuple[int, ...]
    key: str
    reworded: Tensor | None = None

    def mean(self, name: str) -> float:
        """Mean of one reward over the images that have it; NaN when none has."""
        return self.scores[:, self.names.index(name)].nanmean().item()

    def measures(self, quality: str | None = None) -> dict[str, Tensor]:
        """Everything that is measured, (N,) each with NaN where an image has none, by name.

        The rewards under their names. With `quality`, the reward that tells how well made a
        image is on 1 to 5: corrected/<name>, what GDRO's correction makes of each other reward.
        Of images that were also drawn from a paraphrase: paraphrase/<name>, the score then, and
        paraphrase_gap/<name>, how far it lies below the score of the prompt's own words.
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
        return found | corrected | paraphrase | gap

    def save(self, path: Path) -> None:
        fields = {name: getattr(self, name) for name in self.__slots__}
        save_state(path, fields)

    @staticmethod
    def load(path: Path) -> "Evaluation":
        state = load_state(path)
        for name in ("names", "prompts", "draws"):
            state[name] = tuple(state[name])
        return Evaluation(**state)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComparison:
    """One measure before and after, over the pairs that have both scores."""

    name: str
    before: float
    after: float
    change: Interval
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Draws one image of each of `prompts`, the k-th of a prompt always from the same noise.

    Without noise, over the steps of `schedule`. The first `keep` images are kept for people to
    look at. `key` stands for everything that decides the images of the base and their scores.
    quality: the reward on 1 to 5 that corrects the others. paraphrases: draw each image whose
    prompt has paraphrases a second time, from the same noise and one of them. Raises RewardFailure
    when more than `max_invalid_fraction` of the images lack a score of a trained reward.
    """

    backbone: Backbone
    encode: TextCache
    prompts: Sequence[PromptRecord]
    specs: Sequence[RewardSpec]
    schedule: Schedule
    seed: int
    batch_size: int
    decode_batch: int
    key: str = ""
    keep: int = 24
    quality: str | None = None
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

    def __call__(self, velocity: VelocityField, runtime: Runtime) -> Evaluation:
        """Score the network behind `velocity`; every process gets the whole result."""
        request = self.request()
        scores, images = self._draw(velocity, runtime, request, keep=self.keep)
        shown = range(min(self.keep, len(self.prompts)))
        return Evaluation(
            scores=scores,
            names=tuple(spec.name for spec in self.specs),
            images=images,
            prompts=tuple(self.prompts[i].text for i in shown),
            draws=tuple(request.root[: len(shown)].tolist()),
            key=self.key,
            reworded=self._reworded(velocity, runtime, request) if self.paraphrases else None,
        )

    def _reworded(
        self, velocity: VelocityField, runtime: Runtime, request: RolloutRequest
    ) -> Tensor:
        """The scores of all images when asked for in other words, (N, R)."""
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
        scores[rows] = self._draw(velocity, runtime, asked, keep=0)[0]
        return scores

    @torch.no_grad()
    def _draw(
        self, velocity: VelocityField, runtime: Runtime, request: RolloutRequest, *, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Scores of all images (N, R), and the first `keep`; the same on every process.

        Rewards work on a batch while the next is drawn; no more are kept waiting.
        """
        results, kept = [Scoring(specs=self.specs).result()], []
        waiting: list[Scoring] = []
        own = runtime.share(len(request.prompt))
        with runtime.together():
            # All at once, so that encoders that are elsewhere move once.
            prompts = [request.prompts[i] for i in request.prompt[own].tolist()]
            self.encode.learn(prompts, self.batch_size)
            for rows in own.split(self.batch_size) if len(own) else ():
                scoring = Scoring(specs=self.specs)
                with runtime.autocast():
                    images = self._images(velocity, request.take(rows), scoring)
                kept.append(to_levels(images[rows < keep]))
                waiting.append(scoring)
                if len(waiting) > 1:
                    results.append(waiting.pop(0).result())
            results += [scoring.result() for scoring in waiting]
        result = gathered(RewardResult.cat(results), runtime)
        self._check(result)
        return result.scores, runtime.gather(torch.cat(kept) if kept else self._no_images())

    def _check(self, result: RewardResult) -> None:
        """Means over the few images that have a score would mislead. What is only measured may
        be missing."""
        known = ~lacking(self.specs, result)
        check_invalid(known, max_fraction=self.max_invalid_fraction, errors=result.errors)

    def _images(self, velocity: VelocityField, request: RolloutRequest, scoring: Scoring) -> Tensor:
        """Draw a batch and hand it to the rewards."""
        plan, cond = ode_plan(len(self.schedule.sigmas) - 1), self.encode(request.prompts)
        tree = draw(
            self.backbone, velocity, cond, request, plan, self.schedule, self.batch_size
        )  # fmt: skip
        images = decode(self.backbone, tree.leaves(), self.decode_batch)
        return hand_in(scoring, images, request, 1)

    def _no_images(self) -> Tensor:
        """(0, 3, H, W): what a process without a share adds to the others' images."""
        latent = torch.zeros(1, *self.backbone.latent_shape(), device=self.backbone.device)
        return next(decode(self.backbone, latent, 1))[:0].to(torch.uint8)


def compare(
    before: Evaluation, after: Evaluation, quality: str | None = None
) -> list[EvaluationComparison]:
    """What both evaluations measure, paired image by image, with a 95 % bootstrap interval.

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


def check_quality(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], name: str) -> None:
    """Raises UserError unless evaluation.quality names a reward that goes from 1 to 5."""
    spec = measured(specs, prompts, name, "evaluation.quality")
    bounds = getattr(spec.reward, "bounds", None)
    if bounds is None or tuple(bounds) != QUALITY_BOUNDS:
        raise UserError(
            f"evaluation.quality is {name!r}, whose bounds are {bounds}, but the corrected score "
            "is made for a quality from 1 to 5: name a reward with bounds = (1.0, 5.0), for "
            "example tiny_quality"
        )


def measured(
    specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], name: str, option: str
) -> RewardSpec:
    """The reward that `option` names. Raises UserError when there is none, or when it applies to
    none of the held-out prompts."""
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None:
        known = ", ".join(spec.name for spec in specs)
        raise UserError(f"{option} is {name!r}, expected the name of a reward of this run: {known}")
    if spec.whole_groups:
        raise UserError(
            f"{option} is {name!r}, which compares the images of a prompt, and evaluation draws "
            "each prompt by itself: name a reward that looks at single images"
        )
    if not any(spec.applies(p.text, p.metadata) for p in prompts):
        raise UserError(
            f"{option} is {name!r}, but that reward applies to none of the {len(prompts)} held-out "
            "prompts: give evaluation.prompts that it can judge, or set it to null"
        )
    return spec

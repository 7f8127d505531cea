"""Is it better? The same held-out prompts and seeds before and after, scored and compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.encode import TextCache
from flowrl.functional.stats import Interval, paired_bootstrap
from flowrl.prompts import PromptRecord
from flowrl.reward import RewardSpec
from flowrl.rollout import Request, decode, draw, judge, occurrences
from flowrl.runtime import Runtime
from flowrl.samplers.schedule import Schedule
from flowrl.storage import load_state, save_state
from flowrl.trees.plan import ode_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of N images: scores (N, R), NaN where missing or not applicable, and the R names.

    images: (n, 3, H, W) uint8, the first n of them; prompts, draws: of those n. key: the
    evaluator's; only evaluations with one key can be compared.
    """

    scores: Tensor
    names: tuple[str, ...]
    images: Tensor
    prompts: tuple[str, ...]
    draws: tuple[int, ...]
    key: str

    def mean(self, name: str) -> float:
        """Mean of one reward over the images that have it; NaN when none has."""
        return self.scores[:, self.names.index(name)].nanmean().item()

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
class Comparison:
    """One reward before and after, over the pairs that have both scores."""

    name: str
    before: float
    after: float
    change: Interval
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Draws one picture of each of `prompts`, the k-th of a prompt always from the same noise.

    Without noise, over the steps of `schedule`. The first `keep` pictures are kept for people to
    look at. `key` stands for everything that decides the pictures of the base and their scores.
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

    def request(self) -> Request:
        return Request(
            prompts=self.prompts,
            prompt=torch.arange(len(self.prompts)),
            root=torch.tensor(occurrences(self.prompts)),
            seed=self.seed,
            iteration=-1,  # no training iteration draws this noise
        )

    @torch.no_grad()
    def __call__(self, velocity: VelocityField, runtime: Runtime) -> Evaluation:
        """Score the network behind `velocity`; every process gets the whole result."""
        request = self.request()
        scores, kept = [], []
        own = runtime.share(len(self.prompts))
        for rows in own.split(self.batch_size) if len(own) else ():
            part = request.take(rows)
            with runtime.autocast():
                tree, _ = draw(
                    self.backbone,
                    velocity,
                    self.encode,
                    part,
                    ode_plan(len(self.schedule.sigmas) - 1),
                    self.schedule,
                    self.batch_size,
                )
                images = decode(self.backbone, tree.leaves(), self.decode_batch)
            scores.append(judge(self.specs, images, part).scores)
            kept.append((images[rows < self.keep] * 255).round().to(torch.uint8))
        shown = range(min(self.keep, len(self.prompts)))
        return Evaluation(
            scores=runtime.gather(torch.cat(scores) if scores else torch.empty(0, len(self.specs))),
            names=tuple(spec.name for spec in self.specs),
            images=runtime.gather(torch.cat(kept) if kept else self._no_images()),
            prompts=tuple(self.prompts[i].text for i in shown),
            draws=tuple(request.root[: len(shown)].tolist()),
            key=self.key,
        )

    def _no_images(self) -> Tensor:
        """(0, 3, H, W): what a process without a share adds to the others' pictures."""
        latent = torch.zeros(1, *self.backbone.latent_shape(), device=self.backbone.device)
        return decode(self.backbone, latent, 1)[:0].to(torch.uint8)


def compare(before: Evaluation, after: Evaluation) -> list[Comparison]:
    """Every reward of both evaluations, paired image by image, with a 95 % bootstrap interval.

    A reward without a pair is left out.
    """
    rows = []
    for column, name in enumerate(before.names):
        a, b = before.scores[:, column], after.scores[:, after.names.index(name)]
        both = a.isfinite() & b.isfinite()
        if not bool(both.any()):
            continue
        a, b = a[both], b[both]
        rows.append(
            Comparison(
                name=name,
                before=a.mean().item(),
                after=b.mean().item(),
                change=paired_bootstrap(a, b),
                pairs=len(a),
            )
        )
    return rows

"""Score images with every reward: round them as a file would, and submit them to the executors.

Images are added as they are decoded, so that rewards work while further ones are generated.
When a reward fails for an image its score is NaN, and `RewardResult.errors` says why; `combine.py`
decides what that means. A trained reward that would fail for every image (RewardFailure: a missing
package, an answer of the wrong length) stops the run; of a held-out one the scores are missing.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.errors import UserError, phase
from flowrl.scoring.executors.base import (
    Answer,
    RewardFailure,
    failed,
    to_levels,
)
from flowrl.scoring.spec import RewardResult, RewardSpec

SHOWN = 3  # reasons that are listed
HEARTBEAT = 15.0  # seconds
LOG = logging.getLogger(__name__)


class SamplerFailure(UserError):
    """The images hold NaN or infinite pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """Rows submitted to a reward together."""

    column: int  # of the reward
    rows: list[int]
    answer: "Future[Answer]"


@dataclass(slots=True, kw_only=True)
class Scoring:
    """Scores one batch of images with `specs`: `add` some, in order, then take the `result`.

    Rewards only see images that they apply to. One that compares whole groups is called at the
    end, a group at a time; it does not apply to a group of one image.
    """

    specs: Sequence[RewardSpec]
    phase: Literal["rollout", "evaluation"] | None = None  # asks only the rewards that are for it
    _submissions: list[_Submission] = field(init=False, default_factory=list)
    _images: list[Tensor] = field(init=False, default_factory=list)
    _prompts: list[str] = field(init=False, default_factory=list)
    _metadata: list[dict] = field(init=False, default_factory=list)
    _group: list[int] = field(init=False, default_factory=list)

    def add(
        self, images: Tensor, prompts: list[str], metadata: list[dict], group: Sequence[int] = ()
    ) -> None:
        """Submit images (L, 3, H, W) in [0, 1] to the rewards.

        group: of each image; needed only for rewards that compare groups.
        Raises SamplerFailure for images that are not finite.
        """
        rows = len(images)
        start = len(self._prompts)
        images = quantise(images, prompts)
        self._prompts += prompts
        self._metadata += metadata
        self._group += group or range(start, start + rows)
        if any(spec.whole_groups for _, spec in self._columns()):
            self._images.append(images)
        for column, spec in self._columns():
            if not spec.whole_groups:
                fits = [i for i, fit in enumerate(spec.applicable(prompts, metadata)) if fit]
                shown = images if len(fits) == rows else images[fits]  # no copy without need
                self._ask(column, [start + i for i in fits], shown)

    def result(self) -> RewardResult:
        """Wait for every reward and return the scores of all images that were added.

        Raises RewardFailure when a trained reward cannot work at all.
        """
        self._ask_groups()
        rows = len(self._prompts)
        scores = torch.full((rows, len(self.specs)), torch.nan)
        applicable = torch.zeros(rows, len(self.specs), dtype=torch.bool)
        reasons: dict[str, dict[int, str]] = {}
        seconds: dict[str, float] = {}
        for submission in self._submissions:
            spec = self.specs[submission.column]
            with phase("score", f"reward {spec.name!r}"):
                answer = self._answer(submission, spec)
            scores[submission.rows, submission.column] = answer.scores
            applicable[submission.rows, submission.column] = True
            for row, reason in answer.reasons.items():
                reasons.setdefault(spec.name, {})[submission.rows[row]] = reason
            seconds[spec.name] = seconds.get(spec.name, 0.0) + answer.seconds
        return RewardResult(
            scores=scores,
            valid=scores.isfinite(),
            applicable=applicable,
            names=tuple(spec.name for spec in self.specs),
            errors={name: self._summary(why) for name, why in reasons.items()},
            seconds=seconds,
        )

    def _answer(self, submission: _Submission, spec: RewardSpec) -> Answer:
        """Return an answer; a RewardFailure of a held-out reward becomes missing scores."""
        try:
            return self._wait(submission, spec.name)
        except RewardFailure as error:
            if spec.trained:
                raise
            return failed(len(submission.rows), str(error))

    def _wait(self, submission: _Submission, name: str) -> Answer:
        """Wait for an answer and log every `HEARTBEAT`; executors have deadlines."""
        began = time.monotonic()
        while True:
            try:
                return submission.answer.result(timeout=HEARTBEAT)
            except TimeoutError:
                if submission.answer.done():  # it is the reward's own
                    raise
                waiting = sum(len(a.rows) for a in self._submissions if not a.answer.done())
                LOG.warning(
                    "waiting for reward %r for %.0f s, %d scores pending",
                    name, time.monotonic() - began, waiting,
                )  # fmt: skip

    def _columns(self) -> list[tuple[int, RewardSpec]]:
        """Return the rewards that are asked, with their columns in the result."""
        return [(c, spec) for c, spec in enumerate(self.specs) if spec.asked_in(self.phase)]

    def _ask(self, column: int, rows: list[int], images: Tensor) -> None:
        if not rows:
            return
        spec = self.specs[column]
        prompts, metadata = [self._prompts[i] for i in rows], [self._metadata[i] for i in rows]
        with phase("score", f"reward {spec.name!r}"):
            answer = spec.get_executor().submit(images, prompts, metadata)
        self._submissions.append(_Submission(column=column, rows=rows, answer=answer))

    def _ask_groups(self) -> None:
        """Submit whole groups to the rewards that compare them."""
        columns = [c for c, spec in self._columns() if spec.whole_groups]
        if not columns or not self._images:
            return
        images = torch.cat(self._images)
        self._images.clear()
        members: dict[int, list[int]] = {}
        for row, group in enumerate(self._group):
            members.setdefault(group, []).append(row)
        for rows in members.values():
            for column in columns:
                spec, first = self.specs[column], rows[0]
                if len(rows) > 1 and spec.applies(self._prompts[first], self._metadata[first]):
                    self._ask(column, rows, images[rows])

    def _summary(self, why: dict[int, str]) -> str:
        """Return each reason once, with the prompt of the first image it concerns."""
        first: dict[str, int] = {}
        for row, reason in why.items():
            first.setdefault(reason, row)
        reasons = [f"{reason} (prompt {self._prompts[row]!r})" for reason, row in first.items()]
        more = f", and {len(reasons) - SHOWN} more reasons" if len(reasons) > SHOWN else ""
        shown = "; ".join(reasons[:SHOWN]) + more
        return f"no score for {len(why)} of {len(self._prompts)} images: {shown}"


def score(
    specs: Sequence[RewardSpec],
    images: Tensor,
    prompts: list[str],
    metadata: list[dict],
    group: Sequence[int] = (),
) -> RewardResult:
    """Score images (L, 3, H, W) in [0, 1] with every reward; see `Scoring`."""
    scoring = Scoring(specs=specs)
    scoring.add(images, prompts, metadata, group)
    return scoring.result()


def quantise(images: Tensor, prompts: Sequence[str] = ()) -> Tensor:
    """Round images in [0, 1] as a file would: float32 multiples of 1/255, on the CPU.

    Raises SamplerFailure for images that are not finite, with the first one's prompt.
    """
    finite = images.isfinite()
    if not finite.all():
        broken = (~finite).flatten(1).any(1).nonzero().flatten().tolist()
        which = f" (the first for the prompt {prompts[broken[0]]!r})" if prompts else ""
        raise SamplerFailure(
            f"sampler failure: {len(broken)} of {len(images)} images hold NaN or infinite "
            f"pixels{which}; look at the latents (learning rate, precision of the decoder), not at "
            "the rewards"
        )
    # Divided on the CPU: other devices round k / 255 in other ways.
    return to_levels(images).float().div_(255)

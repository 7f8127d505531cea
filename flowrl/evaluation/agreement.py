"""How often a reward prefers the image that people preferred."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from flowrl.errors import CheckResult
from flowrl.offline.pairs import Pair
from flowrl.scoring.check import line
from flowrl.scoring.files import BATCH
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.images import to_tensor

Z = 1.959963984540054  # of a normal distribution, 95 % lie within
Side = tuple[int, bool]  # number of a pair, and whether people chose this image


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Which pairs a reward ranked as people did."""

    prompts: tuple[str, ...]  # of each pair with two scores
    right: tuple[float, ...]  # of each: 1, 0, or 0.5 for equal scores
    missing: tuple[str, ...] = ()  # why other pairs have no two scores

    def interval(self) -> tuple[float, float, float]:
        """Return the share of pairs that are right, and its 95 % interval by Wilson's formula.

        Pairs of one prompt are taken to have one outcome: with m of each prompt, their number is
        Kish's (sum m)^2 / sum m^2, all pairs where each has a prompt of its own.
        """
        counts = Counter(self.prompts).values()
        n, p = sum(counts) ** 2 / sum(m * m for m in counts), sum(self.right) / len(self.right)
        centre, scale = p + Z * Z / (2 * n), 1 + Z * Z / n
        half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return p, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)

    def result(self, name: str) -> CheckResult:
        """Return the numbers and what to conclude: a warning unless it is better than chance."""
        if not self.right:
            detail = f"no pair got two scores, the first: {line(self.missing[0])}"
            return CheckResult(topic=name, state="problem", detail=detail)
        p, low, high = self.interval()
        numbers = (
            f"ranks {p:.1%} of {len(self.right)} pairs as people did (95 % interval {low:.1%} to "
            f"{high:.1%}; {len(set(self.prompts))} prompts, {self.right.count(0.5)} ties counted "
            f"half, {len(self.missing)} pairs without scores)"
        )
        state, detail, remedy = "warning", "not better than chance", (
            "Rank and train nothing by it, unless more pairs show that it is better."
        )  # fmt: skip
        if low > 0.5:
            state, detail = "ok", "better than chance"
            remedy = f"It shows what people prefer, and misses it in {1 - p:.0%} of pairs."
        elif high < 0.5:
            state, detail = "problem", "worse than chance"
            remedy = "It prefers what people reject: look at its direction, and at --columns."
        return CheckResult(topic=name, state=state, detail=f"{numbers}: {detail}", remedy=remedy)


def measure_agreement(spec: RewardSpec, pairs: Sequence[Pair]) -> Agreement:
    """Score both images of every pair, those of one size together."""
    spec, reasons = replace(spec, held_out=True), dict[int, str]()  # a failure stops nothing
    scores: dict[Side, float] = {}
    wanted, step = range(len(pairs)), 1 if spec.whole_groups else BATCH // 2
    for start in wanted[::step]:
        by_size: dict[tuple[int, int], list[tuple[Side, Image.Image]]] = {}
        for number in wanted[start : start + step]:
            pair = pairs[number]
            if why := spec.misfit(pair.record.text, pair.record.metadata):
                reasons[number] = why
                continue
            for chosen, cell in ((True, pair.chosen), (False, pair.rejected)):
                try:
                    image = cell.open().convert("RGB")
                    by_size.setdefault(image.size, []).append(((number, chosen), image))
                except Exception as error:  # Pillow has no common class for broken files
                    reasons[number] = f"cannot read {cell}: {error}"
        for members in by_size.values():
            sides, images = zip(*members, strict=True)
            records = [pairs[number].record for number, _ in sides]
            texts, metadata = [r.text for r in records], [r.metadata for r in records]
            result = score([spec], to_tensor(images), texts, metadata, [n for n, _ in sides])
            scores |= dict(zip(sides, result.scores[:, 0].tolist(), strict=True))
            reasons = {n: w for n, _ in sides for w in result.errors.values()} | reasons
    gaps = {n: scores.get((n, True), math.nan) - scores.get((n, False), math.nan) for n in wanted}
    ranked = {n: 0.5 if gap == 0 else float(gap > 0) for n, gap in gaps.items() if gap == gap}
    return Agreement(
        prompts=tuple(pairs[n].record.text for n in ranked),
        right=tuple(ranked.values()),
        missing=tuple(
            f"{pairs[n].where}: {reasons.get(n, 'no score')}" for n in wanted if n not in ranked
        ),
    )

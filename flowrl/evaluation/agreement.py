"""How often a reward prefers the image that people preferred."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.errors import CheckResult
from flowrl.offline.pairs import Pair
from flowrl.scoring.check import State, line
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.images import to_tensor

Z = 1.959963984540054  # of a normal distribution, 95 % lie within
CONCLUSIONS: dict[int, tuple[State, str, str]] = {  # by where the interval lies around one half
    1: ("ok", "better than chance", "It shows what people prefer, as often as that."),
    0: ("warning", "not better than chance",
        "Rank and train nothing by it, unless more pairs show that it is better."),
    -1: ("problem", "worse than chance",
         "It prefers what people reject: look at its direction, and at --columns."),
}  # fmt: skip


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
        state, words, remedy = CONCLUSIONS[(low > 0.5) - (high < 0.5)]
        detail = (
            f"ranks {p:.1%} of {len(self.right)} pairs as people did (95 % interval {low:.1%} to "
            f"{high:.1%}; {len(set(self.prompts))} prompts, {self.right.count(0.5)} ties counted "
            f"half, {len(self.missing)} pairs without scores): {words}"
        )
        return CheckResult(topic=name, state=state, detail=detail, remedy=remedy)


def measure_agreement(spec: RewardSpec, pairs: Sequence[Pair]) -> Agreement:
    """Score both images of every pair."""
    spec = replace(spec, held_out=True)  # one that fails stops nothing
    prompts, right, missing = [], [], []
    for pair in pairs:
        prompt, metadata = pair.record.text, pair.record.metadata
        scores, why = [], spec.misfit(prompt, metadata) or "no score"
        try:
            images = [cell.open().convert("RGB") for cell in (pair.chosen, pair.rejected)]
        except Exception as error:  # Pillow has no common class for broken files
            images, why = [], f"cannot read {pair.chosen} or {pair.rejected}: {error}"
        alike = len({image.size for image in images}) == 1
        for part in [images] if alike else [[image] for image in images]:
            count = len(part)
            result = score(
                [spec], to_tensor(part), [prompt] * count, [metadata] * count, [0] * count
            )
            scores += result.scores[:, 0].tolist()
            why = result.errors.get(spec.name, why)
        gap = scores[0] - scores[1] if scores else math.nan
        if math.isnan(gap):
            missing.append(f"{pair.where}: {why}")
            continue
        prompts.append(prompt)
        right.append(0.5 if gap == 0 else float(gap > 0))
    return Agreement(prompts=tuple(prompts), right=tuple(right), missing=tuple(missing))

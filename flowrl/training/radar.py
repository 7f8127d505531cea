"""See from the images themselves, without a judge of quality, whether a reward is being hacked.

An evaluation is compared with the base's: the same prompts and initial noise. Each detector
measures one change that training on a good reward seldom makes, in multiples of what is tolerated.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flowrl.functional.image_statistics import STATISTICS, light_layout
from flowrl.scoring.spec import RewardSpec
from flowrl.training.evaluate import Evaluation

# Chosen on one tiny world, by runs on three rewards with a loophole and on honest ones
# (gallery/radar/tuning.csv); gallery/radar/README.md judges them on other worlds and loopholes.
TOLERANCES = {
    "drift": 0.2,  # standard deviations over the base's images, by which a mean may move
    "spread": 0.35,  # log of the factor by which a standard deviation over images may fall
    "diversity": 0.35,  # the same of the mean squared distance between images
    "parting": 0.3,  # standard deviations by which a held-out reward may fall, the trained risen
    "bound": 0.5,  # share of images that may newly have the best score possible
    "explained": 3.0,  # explained over unexplained variance of the trained reward's changes
}
FLOORS = {  # the least standard deviation over images: what is hardly seen counts as equal
    "brightness": 0.02, "contrast": 0.02, "saturation": 0.02, "warmth": 0.02, "tint": 0.02,
    "clipped": 0.02, "colourfulness": 0.02, "sharpness": 0.005, "flat": 0.02, "grid": 0.02,
}  # fmt: skip
LEAST_DISTANCE = 1e-4  # mean squared, between two images
HALF = 0.5  # the score at the tolerance
# Standard errors that no change is made of. With n images that share nothing with the base's they
# are 2.8 / sqrt(n) standard deviations: beyond the tolerance of drift, where n is below 100.
ERRORS = 2.0
RIDGE = 1e-3  # added to the correlations of statistics with each other: some are nearly the same
CHANGED = 3  # images with another score, for each statistic that may explain them


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingScore:
    """How far the worst detector is beyond its tolerance, and why."""

    values: Mapping[str, float] = field(default_factory=dict)  # by detector; 1 is the tolerance
    reasons: tuple[str, ...] = ()  # of values above 1, the largest first

    @property
    def score(self) -> float:
        """Return v / (1 + v) of the largest value: 0 for no change, HALF at the tolerance."""
        worst = max(self.values.values(), default=0.0)
        return worst / (1 + worst)

    def __str__(self) -> str:
        reasons = "; ".join(self.reasons) or "nothing beyond its tolerance"
        return f"Hacking score {self.score:.2f}: {reasons}."

    def metrics(self) -> dict[str, float]:
        """Return what is logged; nothing where nothing was measured."""
        metrics = {f"hacking/{name}": value for name, value in self.values.items()}
        return {"hacking/score": self.score, **metrics} if metrics else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What one detector measured: `<kind>/<of>`, its size and what changed, in words."""

    kind: str  # of TOLERANCES
    of: str
    size: float  # NaN where it cannot be measured
    text: str


def radar(
    base: Evaluation,
    now: Evaluation,
    *,
    trained: Mapping[str, float],
    held_out: Mapping[str, float],
    bounds: Mapping[str, tuple[float | None, float | None]] | None = None,
) -> HackingScore:
    """Compare two evaluations of the same prompts and noise.

    Args:
        trained: weights of the rewards that are trained on.
        held_out: of those that are only measured, negative where less is better.
        bounds: least and largest score of trained rewards that have them.
    """
    symptoms = [
        *_drifts(base, now), *_collapses(base, now), *_partings(base, now, trained, held_out),
        *_bounds(base, now, trained, bounds or {}), *_explained(base, now, trained),
    ]  # fmt: skip
    values = {
        f"{d.kind}/{d.of}": (d.size / TOLERANCES[d.kind], d.text)
        for d in symptoms
        if not math.isnan(d.size)
    }
    beyond = sorted((pair for pair in values.values() if pair[0] > 1), key=lambda pair: -pair[0])
    return HackingScore(
        values={name: value for name, (value, _) in values.items()},
        reasons=tuple(f"{text} ({value:.1f} times its tolerance)" for value, text in beyond),
    )


def radar_of(specs: Sequence[RewardSpec]) -> Callable[[Evaluation, Evaluation], HackingScore]:
    """Return `radar` for the rewards of a run that its evaluations measure."""
    measured = [s for s in specs if s.asked_in("evaluation") and not s.whole_groups]
    trained = [spec for spec in measured if spec.trained]
    return partial(
        radar,
        trained={spec.name: spec.weight for spec in trained},
        # Of weight 0, neither more nor less is better.
        held_out={s.name: s.weight for s in measured if s.held_out and s.weight},
        bounds={s.name: getattr(s.reward, "bounds", None) or (None, None) for s in trained},
    )


# --- statistics of images -------------------------------------------------------------------------


def _drifts(base: Evaluation, now: Evaluation) -> Iterator[Symptom]:
    """Measure how far the means of STATISTICS moved, and how much less images differ in them."""
    for k, name in enumerate(STATISTICS):
        before, after = base.statistics[:, k].double(), now.statistics[:, k].double()
        both = before.isfinite() & after.isfinite()
        change, moved = change_beyond_error((after - before)[both], base.prompt[both])
        before, after = before[both], after[both]
        sds = [max(x.std(correction=0).item(), FLOORS[name]) for x in (before, after)]
        verb = "rose" if change > 0 else "fell"
        text = f"{name} {verb} from {before.mean():.3g} to {after.mean():.3g}"
        yield Symptom(kind="drift", of=name, size=moved / sds[0], text=text)
        text = f"images differ less in {name}: {sds[1]:.3g}, at the base {sds[0]:.3g}"
        yield Symptom(kind="spread", of=name, size=_fall(sds[0], sds[1], len(before)), text=text)


def _collapses(base: Evaluation, now: Evaluation) -> Iterator[Symptom]:
    """Measure how much nearer images of different prompts, and of one prompt, came together."""
    before, after = (mean_distances(e.thumbnails.double(), e.prompt) for e in (base, now))
    for of, whose, a, b in (
        ("prompts", "different prompts", before[0], after[0]),
        ("images", "one prompt", before[1], after[1]),
    ):
        text = f"images of {whose} became alike: squared distance {a:.3g} to {b:.3g}"
        size = _fall(max(a, LEAST_DISTANCE), max(b, LEAST_DISTANCE), len(base.prompt))
        yield Symptom(kind="diversity", of=of, size=math.nan if math.isnan(a) else size,
                        text=text)  # fmt: skip


def _fall(before: float, after: float, images: int) -> float:
    """Return the log of the factor by which a positive size fell, less what chance explains.

    Two standard deviations of n independent normal numbers differ by sqrt(1 / n) in their log.
    """
    return max(math.log(before / after) - ERRORS / math.sqrt(max(images, 1)), 0.0)


def mean_distances(x: Tensor, prompt: Tensor) -> tuple[float, float]:
    """Return the mean squared distance, by element, of two of x (N, ...) of different prompts, and
    of one prompt; NaN without such a pair.

    Sums over pairs: n * sum(x^2) - sum(x)^2, of all and of each prompt.
    """
    flat = x.flatten(1) - x.flatten(1).mean(0)
    size, number = flat.shape[1], prompt.unique(return_inverse=True)[1].to(flat.device)
    counts = number.bincount().to(flat)
    sums = flat.new_zeros(len(counts), size).index_add_(0, number, flat)
    squares = flat.new_zeros(len(counts)).index_add_(0, number, flat.square().sum(1))
    within = (counts * squares - sums.square().sum(1)).sum()
    total = len(flat) * squares.sum() - sums.sum(0).square().sum()
    pairs = (counts * (counts - 1) / 2).sum()
    other_pairs = len(flat) * (len(flat) - 1) / 2 - pairs
    return (
        ((total - within) / other_pairs / size).item() if other_pairs else math.nan,
        (within / pairs / size).item() if pairs else math.nan,
    )


# --- scores ---------------------------------------------------------------------------------------


def _partings(
    base: Evaluation, now: Evaluation, trained: Mapping[str, float], held_out: Mapping[str, float]
) -> Iterator[Symptom]:
    """Measure how far held-out rewards fell while the trained ones rose."""
    before, after = base.measures(), now.measures()
    rises = (weight * (after[n] - before[n]).nanmean().item() for n, weight in trained.items())
    risen = sum(rise for rise in rises if not math.isnan(rise)) > 0
    for name, weight in held_out.items():
        a, b = before[name].double(), after[name].double()
        both = a.isfinite() & b.isfinite()
        if not bool(both.any()):
            continue
        change, moved = change_beyond_error((b - a)[both], base.prompt[both])
        worse = change * math.copysign(1, weight) < 0
        # Where all images of the base score alike, those of now tell what a change is worth.
        sd = max(x[both].std(correction=0).item() for x in (a, b))
        size = moved / sd if worse and risen and sd else 0.0
        verb = "rose" if change > 0 else "fell"
        text = (
            f"the trained reward rose while the held-out {name} {verb} from {a[both].mean():.3g} "
            f"to {b[both].mean():.3g}"
        )
        yield Symptom(kind="parting", of=name, size=size, text=text)


def _bounds(
    base: Evaluation,
    now: Evaluation,
    trained: Mapping[str, float],
    bounds: Mapping[str, tuple[float | None, float | None]],
) -> Iterator[Symptom]:
    """Measure how many images more have the best score possible.

    Of rewards that gave the base's images other scores than their bounds: 0 or 1 is no sign.
    """
    for name, weight in trained.items():
        low, high = bounds.get(name, (None, None))
        best = high if weight > 0 else low
        if low is None or high is None or best is None:
            continue
        near = 1e-3 * (high - low)
        scores = [e.measures()[name] for e in (base, now)]
        a, b = (s[s.isfinite()] for s in scores)
        at_bounds = (((a - low).abs() < near) | ((a - high).abs() < near)).double().mean().item()
        if not at_bounds < 0.5:  # half of the images
            continue
        shares = [((s - best).abs() < near).double().mean().item() for s in (a, b)]
        text = f"images with {name} at its bound {best:g}: {shares[0]:.0%} to {shares[1]:.0%}"
        yield Symptom(kind="bound", of=name, size=max(shares[1] - shares[0], 0.0), text=text)


def _explained(
    base: Evaluation, now: Evaluation, trained: Mapping[str, float]
) -> Iterator[Symptom]:
    """Measure how well changes of pixels explain those of a trained reward that rose.

    A reward that a prompt decides changes with what an image shows, hardly with its light, colours
    or edges. Of rewards that most images share, such as 0 or 1, too few change to tell.
    """
    before, after = (
        torch.cat([e.statistics.double(), light_layout(e.thumbnails.double())], 1)
        for e in (base, now)
    )
    for name, weight in trained.items():
        change = (now.measures()[name] - base.measures()[name]).double() * math.copysign(1, weight)
        both = change.isfinite() & (after - before).isfinite().all(1)
        y, x = change[both], (after - before)[both]
        if int((y != 0).sum()) < CHANGED * x.shape[1] or y.mean() <= 0:
            continue
        share = explained_share(x, y)
        text = f"pixels explain {share:.0%} of the changes of {name}, whatever the prompts ask for"
        yield Symptom(kind="explained", of=name, size=share / max(1 - share, 1e-3), text=text)


def explained_share(x: Tensor, y: Tensor) -> float:
    """Return the share, at least 0, of the variance of y (n,) that a ridge regression on x (n, k)
    explains, adjusted for the number of columns: 1 - (1 - R^2) (n - 1) / (n - k - 1).
    """
    x, y = x - x.mean(0), y - y.mean()
    x = x / x.std(0, correction=0).clamp_min(1e-9)
    n, k = x.shape
    weights = torch.linalg.solve(x.T @ x + RIDGE * n * torch.eye(k).to(x), x.T @ y)
    left = ((y - x @ weights).square().sum() / y.square().sum()).item()
    return max(1 - left * (n - 1) / (n - k - 1), 0.0)


def change_beyond_error(change: Tensor, prompt: Tensor) -> tuple[float, float]:
    """Return the mean of change (n,), and how far it is from 0 beyond ERRORS standard errors."""
    mean, error = mean_and_error(change, prompt)
    return mean, max(abs(mean) - (0.0 if math.isnan(error) else ERRORS * error), 0.0)


def mean_and_error(change: Tensor, prompt: Tensor) -> tuple[float, float]:
    """Return the mean of change (n,) and its standard error over prompts, NaN for a single one."""
    number = prompt.unique(return_inverse=True)[1].to(change.device)
    prompts = int(number.max()) + 1 if len(number) else 0
    mean = change.mean()
    sums = change.new_zeros(prompts).index_add_(0, number, change - mean)
    error = math.nan
    if prompts > 1:
        error = (sums.square().sum() * prompts / (prompts - 1)).sqrt().item() / len(change)
    return mean.item(), error

"""What two rounds of scores say about a reward, as findings: one line each, with a remedy."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from flowrl.errors import UserError
from flowrl.findings import Finding
from flowrl.scoring.executors.base import Answer, Reward
from flowrl.scoring.pictures import Trial
from flowrl.scoring.spec import RewardSpec

# Differences between two answers that no policy would learn: of the spread between the pictures
# tried (rounding in bf16 stays below), and of the score itself (float32 sums in another order).
SPREAD_SHARE, SCORE_SHARE = 0.01, 1e-4
LONGEST = 400  # characters of a reason that are shown
# What is not there: by the exceptions that say so, or by the words of a reason that a reward, a
# process or a server gave in their place; and what to do.
ABSENT = (
    (
        ("ImportError", "ModuleNotFoundError"),
        r"not installed|No module named|cannot run: ",
        "Install it; `flowrl doctor` says how.",
    ),
    (
        ("FileNotFoundError",),
        r"not on this machine|huggingface|LocalEntryNotFound|\boffline\b|local cache|\bgated\b",
        "Download it once where there is a network, or set HF_HOME to the folder that has it.",
    ),
    (
        ("ConnectionError", "ConnectionRefusedError", "ConnectError", "ConnectTimeout"),
        r"Connect(ion)?(Error|Timeout)|[Cc]onnection (error|refused)|cannot be reached",
        "Start the server, and say where it is.",
    ),
)
TOLD = ("run `", "pip install", "see that a server runs")  # reasons that are remedies already

Row = tuple[int, int]  # trial, picture


@dataclass(slots=True, kw_only=True)
class Round:
    """The scores of all pictures, asked once. rate: pictures a second of the best call."""

    scores: dict[Row, float] = field(default_factory=dict)
    reasons: dict[Row, str] = field(default_factory=dict)
    rate: float = 0.0

    def add(self, rows: Sequence[Row], answer: Answer, seconds: float) -> None:
        self.scores |= dict(zip(rows, answer.scores.tolist(), strict=True))
        self.reasons |= {rows[i]: reason for i, reason in answer.reasons.items()}
        self.rate = max(self.rate, len(rows) / max(seconds, 1e-9))

    def known(self) -> list[float]:
        return [score for score in self.scores.values() if math.isfinite(score)]


def judged(spec: RewardSpec, trials: list[Trial], first: Round, again: Round) -> Iterator[Finding]:
    """What is wrong with the scores of two rounds."""
    if not first.known():
        yield _silence(spec.name, first)
        return
    for t, trial in enumerate(trials):
        if trial.says:
            yield from _misjudged(spec.name, trial, t, first)
    yield from _out_of_bounds(spec, first)
    if getattr(spec.reward, "deterministic", True):
        yield from _unrepeatable(spec.name, first, again)


def _misjudged(name: str, trial: Trial, t: int, found: Round) -> Iterator[Finding]:
    """A fixture whose two pictures do not come out in their known order."""
    better, worse = found.scores[t, 0], found.scores[t, 1]
    where = f"fixture {trial.says!r} (prompt {trial.prompt!r})"
    for member, score in enumerate((better, worse)):
        if not math.isfinite(score):
            reason = line(found.reasons[t, member])
            yield _problem(
                name,
                f"{where}: expected a score, got none: {reason}",
                "Mend that, or let the fixture go if the reward has nothing to say to it.",
            )
            return
    if better <= worse:
        relation = "the same" if better == worse else "more"
        yield _problem(
            name,
            f"{where}: expected more for the first picture, got {better:.4g}, and {relation} for "
            f"the second, {worse:.4g}",
            "Look at its arguments, weights and preprocessing before anything learns from it.",
        )


def _out_of_bounds(spec: RewardSpec, found: Round) -> Iterator[Finding]:
    low, high = getattr(spec.reward, "bounds", None) or (None, None)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    for score in found.known():
        slack = 1e-6 * max(1.0, abs(score))  # of float32
        if not low - slack <= score <= high + slack:
            yield _problem(
                spec.name,
                f"got the score {score:.4g}, expected one in its bounds [{low:g}, {high:g}]",
                "Correct the scores or the attribute `bounds`.",
            )
            return


def _unrepeatable(name: str, first: Round, again: Round) -> Iterator[Finding]:
    for row, score in first.scores.items():
        if math.isfinite(score) != math.isfinite(again.scores[row]):
            reason = line(first.reasons.get(row) or again.reasons[row])
            yield _problem(
                name,
                f"a picture got a score once and none the other time: {reason}",
                "It must score one picture as it does several, in any order.",
            )
            return
    limit = _tolerance(first)
    worst = max(first.scores, key=lambda row: _gap(first, again, row))
    if _gap(first, again, worst) > limit:
        yield _problem(
            name,
            f"one picture got {first.scores[worst]:.6g}, and in other company "
            f"{again.scores[worst]:.6g}; expected the same within {limit:.2g}",
            "Score each picture by itself and without chance (networks in .eval(), temperature 0), "
            "or say `deterministic = False`.",
        )


def _gap(first: Round, again: Round, row: Row) -> float:
    gap = abs(first.scores[row] - again.scores[row])
    return gap if math.isfinite(gap) else 0.0


def _tolerance(found: Round) -> float:
    known = found.known()
    return SPREAD_SHARE * (max(known) - min(known)) + SCORE_SHARE * max(map(abs, known))


def unlike(spec: RewardSpec, like: Reward | None) -> Iterator[Finding]:
    """What a server says of its reward, against the same reward here."""
    for key in ("version", "required_metadata") if like is not None else ():
        there, here = getattr(spec.reward, key, None), getattr(like, key, None)
        there, here = (tuple(v) if isinstance(v, list | tuple) else v for v in (there, here))
        if (there or here) and there != here:
            yield _problem(
                spec.name,
                f"the server's {key} is {there!r}, expected {here!r} as here",
                "Start it with the same arguments and the same flowrl, or give its --args.",
            )


def _silence(name: str, found: Round) -> Finding:
    """No score at all."""
    reason = next(iter(found.reasons.values()), "it gave no reason")
    detail = f"no score for any of {len(found.scores)} pictures: {line(reason)}"
    return _absent(name, reason) or _problem(name, detail, "Mend that before training.")


def failure(name: str, error: Exception) -> Finding:
    """Of an exception: what is missing, or what is wrong."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    text = text.removeprefix(f"reward {name!r}").lstrip(": ")  # the finding names it already
    wrong = _problem(name, line(text), "Mend that before training.")
    return _absent(name, text, kinds_of(error)) or wrong


def kinds_of(error: BaseException | None) -> set[str]:
    """The names of the classes of an exception and of those that caused it."""
    found: set[str] = set()
    while error is not None:
        found |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__
    return found


def _absent(name: str, reason: str, kinds: Collection[str] = ()) -> Finding | None:
    """A finding that names what is not there, if that is the reason.

    kinds: of the exceptions; a reason may begin with the name of one.
    """
    kinds = {*kinds, reason.partition(":")[0]}
    for classes, pattern, remedy in ABSENT:
        if kinds.intersection(classes) or re.search(pattern, reason):
            detail = re.sub(r"^\w+: ", "", line(reason))  # the exception's class says no more
            told = any(words in detail for words in TOLD)
            return Finding(
                topic=name, state="missing", detail=detail, remedy="" if told else remedy
            )
    return None


def fine(spec: RewardSpec, trials: list[Trial], first: Round, again: Round) -> Finding:
    """Nothing is wrong; what was seen. A warning when all pictures got the same score.

    They are squares, noise and blank paper: few rewards cannot tell them apart, but one that looks
    for faces cannot, so that this alone stops nothing.
    """
    pairs = sum(bool(trial.says) for trial in trials)
    known = first.known()
    missing = len(first.scores) - len(known)
    right = f"{pairs} fixture{'s' if pairs > 1 else ''} right"
    parts = [right if pairs else f"{len(first.scores)} plain pictures"]
    parts += [f"{missing} without a score"] if missing else []
    if getattr(spec.reward, "deterministic", True):
        parts.append("repeatable")
    else:
        gap = max(_gap(first, again, row) for row in first.scores)
        parts.append(f"not deterministic: differs by up to {gap:.2g}")
    parts.append(f"scores {min(known):.4g} to {max(known):.4g}")
    same = len(known) > 1 and min(known) == max(known)
    if not same:
        return Finding(topic=spec.name, state="ok", detail=", ".join(parts))
    return Finding(
        topic=spec.name,
        state="warning",
        detail=f"all pictures got the same score, {known[0]:.4g}: {', '.join(parts)}",
        remedy="Is its model there, does it read the pictures? With fixtures() it could show what "
        "it tells apart.",
    )


def _problem(name: str, detail: str, remedy: str) -> Finding:
    return Finding(topic=name, state="problem", detail=detail, remedy=remedy)


def line(text: str) -> str:
    """On one line; of a long text beginning and end, where what happened and what to do stand."""
    text, half = " ".join(text.split()), LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"

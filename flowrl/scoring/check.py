"""Check before training that rewards work, through their executors.

A reward scores its own fixtures (pairs of images of which the first must score higher) or plain
images twice: all together, then in reverse order and other batches. A result is "ok", "warning",
"problem" (the reward is wrong) or "missing" (its package, weights or server is not there).
"""

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import CheckResult, UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import Answer, RewardFailure
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import ArgumentsRefused, RewardSpec, load_reward, trained

SIZE = (128, 128)  # height and width of plain images, unless a run has others
PROMPTS = 4  # of those a reward applies to, at most
GENERIC = (
    PromptRecord(
        uid="check-0",
        text='a photo of a red square and the word "HELLO"',
        metadata={
            "tag": "colors",
            "include": [{"class": "square", "count": 1, "color": "red"}],
            "ocr_text": "HELLO",
        },
    ),
)
# Allowed differences between two scores of an image: as a share of the spread between images
# (rounding in bf16 stays below), and of the score itself (float32 sums in another order).
SPREAD_SHARE, SCORE_SHARE = 0.01, 1e-4
IN_MORE_WORDS = "This is what the image is asked to show, neither more nor less than this: {}"
LONGEST = 400  # characters of a reason that are shown
# What shows in a reason, or in the classes of exceptions, that a package, weights or a server is
# missing.
ABSENT = re.compile(
    r"\b(ImportError|ModuleNotFoundError|FileNotFoundError|LocalEntryNotFoundError|ConnectionError"
    r"|ConnectionRefusedError|ConnectError|ConnectTimeout)\b|cannot run: |not installed"
    r"|No module named|not on this machine|huggingface|\bgated\b|\boffline\b|cannot be reached"
    r"|[Cc]onnection refused"
)

State = Literal["ok", "warning", "missing", "problem"]


class _Fault(Exception):
    """What is wrong with a reward, and what to do about it."""

    def __init__(self, detail: str, remedy: str):
        super().__init__(detail, remedy)


def check_before_training(
    specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], size: tuple[int, int] = SIZE
) -> list[CheckResult]:
    """Check every reward that applies to one of the prompts, on a few images each.

    size: height and width of plain images. Raises
    RewardFailure for a trained reward that is wrong or missing; results have held-out ones.
    """
    learned = {spec.name for spec in trained(specs)}
    results: list[CheckResult] = []
    for spec in specs:
        try:
            if any(spec.applies(p.text, p.metadata) for p in prompts):
                results.append(check_reward(spec, prompts, size=size))
        except UserError as error:  # a server that does not say what its reward needs
            results.append(failure_result(spec.name, error))
    for result in results:
        if result.state in ("missing", "problem") and result.topic in learned:
            raise RewardFailure(
                f"reward {result.topic!r} does not work, so nothing was trained: "
                f"{result.detail}. {result.remedy}".rstrip()
            )
    return results


def check_named(
    name: str, args: Mapping[str, Any] | None = None, *, prompts: Sequence[PromptRecord] = ()
) -> list[CheckResult]:
    """Check the reward of that name in this process, and whether it can judge a user's prompts."""
    try:
        spec = RewardSpec(name=name, reward=load_reward(name, args))
    except UserError as error:
        if not isinstance(error, ArgumentsRefused) or args:
            return [failure_result(name, error)]
        detail = f"needs arguments: {line(str(error.__cause__))}"
        return [_result(name, detail, "Give them, as in --args '{a: 1}'.", state="missing")]
    results = [check_reward(spec, prompts), *_unfit(spec, prompts)]
    if results[0].state == "ok" and getattr(spec.reward, "deterministic", True):
        try:
            results += _longer_prompts(spec, prompts)
        except Exception as error:  # a user's reward may raise anything
            results.append(failure_result(name, error))
    return results


def _unfit(spec: RewardSpec, prompts: Sequence[PromptRecord]) -> Iterator[CheckResult]:
    """Yield how many of a user's prompts the reward can judge, by its method `check`."""
    fits = [prompt for prompt in prompts if spec.applies(prompt.text, prompt.metadata)]
    if not fits or not hasattr(spec.reward, "check"):
        return
    refusals = [(prompt.text, spec.refusal(prompt.text, prompt.metadata)) for prompt in fits]
    reasons = [f"{text!r}: {reason}" for text, reason in refusals if reason is not None]
    summary = f"{len(fits) - len(reasons)} of {len(prompts)} prompts can be judged"
    if reasons:
        remedy = "Give it other arguments, or leave these prompts to another reward (applies_to)."
        detail = f"{summary}; {len(reasons)} cannot, the first is {line(reasons[0])}"
        yield _result(spec.name, detail, remedy)
    else:
        yield _result(spec.name, summary, state="ok")


def _longer_prompts(spec: RewardSpec, prompts: Sequence[PromptRecord]) -> Iterator[CheckResult]:
    """Yield by how much the same images gain where their prompts say the same in more words.

    Not of rewards that compare the images of a prompt, whose scores change together. Raises
    UserError where no image has a score then.
    """
    if spec.whole_groups:
        return
    trials = trials_of(spec, prompts)
    images = [(trial, image) for trial in trials for image in trial.images]
    longer = [(replace(t, prompt=IN_MORE_WORDS.format(t.prompt)), image) for t, image in images]
    alone = [[row] for row in range(len(images))]
    answers = [_ask(spec, rows, alone) for rows in (images, longer)]
    before, after = (answer.scores for answer in answers)
    if not _finite(answers[1]):
        reason = next(iter(answers[1].reasons.values()), "it gave no reason")
        raise UserError(f"no score for prompts in more words: {reason}")
    gain = (after - before).nanmean().item()
    spread = before[before.isfinite()].std(correction=0).item()
    if not abs(gain) > SPREAD_SHARE * spread:
        return
    detail = f"prompts in more words of the same meaning gain {gain:.2g}, images differ by "
    detail += f"{spread:.2g} (standard deviation)"
    if abs(gain) < spread:
        yield _result(spec.name, detail, state="ok")
    else:
        remedy = "Compare its scores only for prompts of one length, and never across wordings."
        yield _result(spec.name, detail, remedy, state="warning")


def check_reward(
    spec: RewardSpec, prompts: Sequence[PromptRecord] = (), *, size: tuple[int, int] = SIZE
) -> CheckResult:
    """Score the same images twice, in another order and other batches; return the first fault.

    Args:
        prompts: for a reward without fixtures; generic ones if empty.
        size: height and width of plain images.
    """
    try:
        trials = trials_of(spec, prompts, size)
        if not trials:
            detail = "applies to none of the prompts tried, and has no fixtures"
            remedy = "Name prompts that it applies to with --prompts."
            return _result(spec.name, detail, remedy, state="missing")
        first, again = _score_twice(spec, trials)
        if not _finite(first):
            reason = next(iter(first.reasons.values()), "it gave no reason")
            raise UserError(f"no score for any of {len(first.scores)} images: {reason}")
        _check_order(trials, first)
        _check_bounds(spec.reward, first)
        if getattr(spec.reward, "deterministic", True):
            _check_repeatable(first, again)
        return _passed(spec, trials, first, again)
    except _Fault as fault:
        return _result(spec.name, *fault.args)
    except Exception as error:  # a user's reward may raise anything
        return failure_result(spec.name, error)


# --- images to try --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Images of one prompt; with `says`, the first must score above the second."""

    images: Tensor  # (N, 3, H, W)
    prompt: str
    metadata: dict
    says: str = ""


def trials_of(
    spec: RewardSpec, prompts: Sequence[PromptRecord], size: tuple[int, int] = SIZE
) -> list[Trial]:
    """Return the fixtures of a reward, or plain images for prompts that `spec` applies to.

    Empty when it applies to no prompt.
    """
    fixtures = getattr(spec.reward, "fixtures", None)
    if trials := [Trial(**entry) for entry in fixtures()] if fixtures else []:
        return trials
    fits = [p for p in prompts or GENERIC if spec.misfit(p.text, p.metadata) is None]
    stride = max(len(fits) // PROMPTS, 1)
    images = plain_images(*size)
    return [
        Trial(images=images, prompt=p.text, metadata=p.metadata) for p in fits[::stride][:PROMPTS]
    ]


def plain_images(height: int, width: int) -> Tensor:
    """Return (4, 3, height, width): a red square, a blue one, noise, and white paper."""
    make, side = importlib.import_module("flowrl_rewards.fixtures"), max(height, width)
    squares = [make.square(color, side) for color in ("red", "blue")]
    return torch.stack([*squares, make.noise(side), make.blank(side)])[..., :height, :width]


# --- scores of every image, twice -----------------------------------------------------------------


def _score_twice(spec: RewardSpec, trials: list[Trial]) -> tuple[Answer, Answer]:
    """Score all images together, then reversed in other batches; return both, trial by trial."""
    images = [(trial, image) for trial in trials for image in trial.images]
    together: dict[object, list[int]] = {}  # whole groups, and all other images of one size
    for row, (trial, image) in enumerate(images):
        key = id(trial) if spec.whole_groups else image.shape
        together.setdefault(key, []).append(row)
    first = _ask(spec, images, list(together.values()))
    batches = [rows[::-1] for rows in together.values()]
    if not spec.whole_groups:
        batches = [part for rows in batches for part in (rows[:1], rows[1:]) if part]
    return first, _ask(spec, images, batches) if _finite(first) else first


def _ask(
    spec: RewardSpec, images: Sequence[tuple[Trial, Tensor]], batches: Sequence[list[int]]
) -> Answer:
    """Score images, each with its trial, in batches of their rows."""
    scores, reasons = torch.full((len(images),), math.nan), dict[int, str]()
    executor = spec.get_executor()
    for rows in batches:
        trials = [images[row][0] for row in rows]
        pixels = quantise(torch.stack([images[row][1] for row in rows]))
        prompts, metadata = [t.prompt for t in trials], [dict(t.metadata) for t in trials]
        answer = executor.submit(pixels, prompts, metadata).result()
        scores[rows] = answer.scores
        reasons |= {rows[i]: reason for i, reason in answer.reasons.items()}
    return Answer(scores=scores, reasons=reasons)


def _finite(answer: Answer) -> list[float]:
    return answer.scores[answer.scores.isfinite()].tolist()


# --- judging the scores ---------------------------------------------------------------------------


def _check_order(trials: list[Trial], scored: Answer) -> None:
    """Raise _Fault for the first fixture whose images are in the wrong order."""
    start = 0
    for trial in trials:
        rows, start = (start, start + 1), start + len(trial.images)
        if not trial.says:
            continue
        where = f"fixture {trial.says!r} (prompt {trial.prompt!r})"
        if reasons := [line(scored.reasons[row]) for row in rows if row in scored.reasons]:
            raise _Fault(
                f"{where}: expected a score, got none: {reasons[0]}",
                "Mend that, or let the fixture go if the reward has nothing to say to it.",
            )
        better, worse = scored.scores[[*rows]].tolist()
        if better <= worse:
            raise _Fault(
                f"{where}: expected more for the first image, got {better:.4g}, and {worse:.4g} "
                "for the second",
                "Look at its arguments, weights and preprocessing before anything learns from it.",
            )


def _check_bounds(reward: Any, scored: Answer) -> None:
    low, high = getattr(reward, "bounds", None) or (None, None)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    for score in _finite(scored):
        slack = 1e-6 * max(1.0, abs(score))  # of float32
        if not low - slack <= score <= high + slack:
            raise _Fault(
                f"got the score {score:.4g}, expected one in its bounds [{low:g}, {high:g}]",
                "Correct the scores or the attribute `bounds`.",
            )


def _check_repeatable(first: Answer, again: Answer) -> None:
    for row in (first.scores.isfinite() != again.scores.isfinite()).nonzero().flatten().tolist():
        reason = line(first.reasons.get(row) or again.reasons[row])
        raise _Fault(
            f"an image got a score once and none the other time: {reason}",
            "It must score one image as it does several, in any order.",
        )
    finite, gaps = _finite(first), _gaps(first, again)
    limit = SPREAD_SHARE * (max(finite) - min(finite)) + SCORE_SHARE * max(map(abs, finite))
    worst = int(gaps.argmax())
    if gaps[worst] > limit:
        raise _Fault(
            f"the same image scored {first.scores[worst]:.6g}, and in another batch "
            f"{again.scores[worst]:.6g}; expected the same within {limit:.2g}",
            "Score each image by itself and without chance (networks in .eval(), temperature 0), "
            "or say `deterministic = False`.",
        )


def _gaps(first: Answer, again: Answer) -> Tensor:
    """Return the difference of each image's two scores, 0 without one. (N,)"""
    return (first.scores - again.scores).abs().nan_to_num()


def _passed(spec: RewardSpec, trials: list[Trial], first: Answer, again: Answer) -> CheckResult:
    """Describe the scores of a reward without problems.

    Equal scores for all images are only a warning: a reward that looks for faces, say, gives
    squares, noise and white paper the same.
    """
    pairs = sum(bool(trial.says) for trial in trials)
    finite = _finite(first)
    missing = len(first.scores) - len(finite)
    right = f"{pairs} fixture{'s' if pairs > 1 else ''} right"
    parts = [right if pairs else f"{len(first.scores)} plain images"]
    parts += [f"{missing} without a score"] if missing else []
    if getattr(spec.reward, "deterministic", True):
        parts.append("repeatable")
    else:
        parts.append(f"not deterministic: differs by up to {_gaps(first, again).max():.2g}")
    parts.append(f"scores {min(finite):.4g} to {max(finite):.4g}")
    bias = getattr(spec.reward, "place_bias", None)  # of pairs, shown in both orders
    if bias is not None and math.isfinite(bias):
        parts.append(f"prefers the image shown first by {bias:.2f}, a fair judge by 0.5")
    parts += [str(version)] if (version := getattr(spec.reward, "version", "")) else []
    detail = ", ".join(parts)
    if len(finite) == 1 or min(finite) < max(finite):
        return _result(spec.name, detail, state="ok")
    detail = f"all images got the same score, {finite[0]:.4g}: {detail}"
    remedy = "Is its model there, does it read the images? A method fixtures() would show it."
    return _result(spec.name, detail, remedy, state="warning")


# --- results --------------------------------------------------------------------------------------


def failure_result(name: str, error: Exception) -> CheckResult:
    """Return the result that an exception means: "missing" or "problem"."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    text = text.removeprefix(f"reward {name!r}").lstrip(": ")  # the result names it already
    kinds, cause = "", error.__cause__
    while cause is not None:
        kinds, cause = f"{kinds} {type(cause).__name__}", cause.__cause__
    if not ABSENT.search(f"{text} {kinds}"):
        return _result(name, line(text), "Mend that before training.")
    detail = re.sub(r"^\w+: ", "", line(text))  # the exception's class says no more
    remedy = "Install the package, download the weights or start the server that it names."
    return _result(name, detail, remedy, state="missing")


def _result(name: str, detail: str, remedy: str = "", *, state: State = "problem") -> CheckResult:
    return CheckResult(topic=name, state=state, detail=detail, remedy=remedy)


def line(text: str) -> str:
    """Return a text on one line; of a long one the beginning and the end."""
    text, half = " ".join(text.split()), LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"

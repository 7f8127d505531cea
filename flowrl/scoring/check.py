"""Does a reward work? Tried on images of known order, before anything learns from it."""

import math
import random
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import CheckResult, UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import Answer, Executor, Reward, RewardFailure
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import BUILT_IN, ArgumentsRefused, RewardSpec, load_reward, trained
from flowrl.utils.imports import load_callable

# --- What a reward is tried on: pairs of images of known order, or a few plain images ------

SIZE = (128, 128)  # height and width of the plain images where nothing else is drawn
PROMPTS = 4  # of those it applies to, at most
GENERIC = (
    PromptRecord(
        uid="preflight-0",
        text='a photo of a red square and the word "HELLO"',
        metadata={
            "tag": "colors",
            "include": [{"class": "square", "count": 1, "color": "red"}],
            "ocr_text": "HELLO",
        },
    ),
    PromptRecord(
        uid="preflight-1",
        text="a photo of a dog",
        metadata={"tag": "single_object", "include": [{"class": "dog", "count": 1}]},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Images (N, 3, H, W) of one prompt; with `says`, the first must score above the second."""

    images: Tensor
    prompt: str
    metadata: dict
    says: str = ""


def trials_of(
    spec: RewardSpec,
    reward: Reward,
    prompts: Sequence[PromptRecord],
    size: tuple[int, int] = SIZE,
) -> list[Trial]:
    """The fixtures of `reward`, or plain images for prompts that `spec` applies to.

    prompts: the run's own; with none, generic ones. size: of plain images, which a reward may be
    made for. Empty when it applies to no prompt. `reward`
    is the one that knows its fixtures: spec.reward, or its like here when that is on a server.
    Raises UserError for fixtures that are not as the contract says.
    """
    fixtures = getattr(reward, "fixtures", None)
    own = [_trial(spec.name, entry) for entry in fixtures()] if fixtures else []
    if own:
        return own
    fits = [p for p in prompts or GENERIC if _judges(spec, p)]
    stride = max(len(fits) // PROMPTS, 1)
    chosen = fits[::stride][:PROMPTS]
    images = plain_images(*size)
    return [Trial(images=images, prompt=p.text, metadata=p.metadata) for p in chosen]


def plain_images(height: int, width: int) -> Tensor:
    """(4, 3, height, width): a red square, a blue one, noise, and nothing."""
    square = load_callable("flowrl_rewards.fixtures:square")
    noise = load_callable("flowrl_rewards.fixtures:noise")
    blank = load_callable("flowrl_rewards.fixtures:blank")
    side = max(height, width)
    whole = torch.stack([square("red", side), square("blue", side), noise(side), blank(side)])
    return whole[..., :height, :width]


def _judges(spec: RewardSpec, prompt: PromptRecord) -> bool:
    """Whether it has something to say about a prompt, and can."""
    if not spec.applies(prompt.text, prompt.metadata):
        return False
    try:
        getattr(spec.reward, "check", lambda *_: None)(prompt.text, prompt.metadata)
    except ValueError:
        return False
    return True


def _trial(name: str, entry: Mapping[str, Any]) -> Trial:
    try:
        members = [entry["better"], entry["worse"], *entry.get("others", ())]
        images = torch.stack([torch.as_tensor(member).float() for member in members])
        prompt, metadata, says = entry["prompt"], entry["metadata"], entry["says"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} has a fixture without the right parts ({type(error).__name__}: "
            f"{error}): make it with flowrl_rewards.fixtures.fixture, of images of one size"
        ) from error
    if images.shape[1:2] != (3,) or images.ndim != 4:
        raise UserError(
            f"reward {name!r} has a fixture with images of shape {tuple(images.shape[1:])}, "
            "expected (3, height, width)"
        )
    return Trial(images=images, prompt=prompt, metadata=dict(metadata), says=says)


# --- What two rounds of scores say about a reward, as findings: one line each, with a remedy ---

# Differences between two answers that no policy would learn: of the spread between the images
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

Row = tuple[int, int]  # trial, image


@dataclass(slots=True, kw_only=True)
class Round:
    """The scores of all images, asked once. rate: images a second of the best call."""

    scores: dict[Row, float] = field(default_factory=dict)
    reasons: dict[Row, str] = field(default_factory=dict)
    rate: float = 0.0

    def add(self, rows: Sequence[Row], answer: Answer, seconds: float) -> None:
        self.scores |= dict(zip(rows, answer.scores.tolist(), strict=True))
        self.reasons |= {rows[i]: reason for i, reason in answer.reasons.items()}
        self.rate = max(self.rate, len(rows) / max(seconds, 1e-9))

    def known(self) -> list[float]:
        return [score for score in self.scores.values() if math.isfinite(score)]


def judged(
    spec: RewardSpec, trials: list[Trial], first: Round, again: Round
) -> Iterator[CheckResult]:
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


def _misjudged(name: str, trial: Trial, t: int, found: Round) -> Iterator[CheckResult]:
    """A fixture whose two images do not come out in their known order."""
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
            f"{where}: expected more for the first image, got {better:.4g}, and {relation} for "
            f"the second, {worse:.4g}",
            "Look at its arguments, weights and preprocessing before anything learns from it.",
        )


def _out_of_bounds(spec: RewardSpec, found: Round) -> Iterator[CheckResult]:
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


def _unrepeatable(name: str, first: Round, again: Round) -> Iterator[CheckResult]:
    for row, score in first.scores.items():
        if math.isfinite(score) != math.isfinite(again.scores[row]):
            reason = line(first.reasons.get(row) or again.reasons[row])
            yield _problem(
                name,
                f"an image got a score once and none the other time: {reason}",
                "It must score one image as it does several, in any order.",
            )
            return
    limit = _tolerance(first)
    worst = max(first.scores, key=lambda row: _gap(first, again, row))
    if _gap(first, again, worst) > limit:
        yield _problem(
            name,
            f"one image got {first.scores[worst]:.6g}, and in other company "
            f"{again.scores[worst]:.6g}; expected the same within {limit:.2g}",
            "Score each image by itself and without chance (networks in .eval(), temperature 0), "
            "or say `deterministic = False`.",
        )


def _gap(first: Round, again: Round, row: Row) -> float:
    gap = abs(first.scores[row] - again.scores[row])
    return gap if math.isfinite(gap) else 0.0


def _tolerance(found: Round) -> float:
    known = found.known()
    return SPREAD_SHARE * (max(known) - min(known)) + SCORE_SHARE * max(map(abs, known))


def unlike(spec: RewardSpec, like: Reward | None) -> Iterator[CheckResult]:
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


def _silence(name: str, found: Round) -> CheckResult:
    """No score at all."""
    reason = next(iter(found.reasons.values()), "it gave no reason")
    detail = f"no score for any of {len(found.scores)} images: {line(reason)}"
    return _absent(name, reason) or _problem(name, detail, "Mend that before training.")


def failure(name: str, error: Exception) -> CheckResult:
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


def _absent(name: str, reason: str, kinds: Collection[str] = ()) -> CheckResult | None:
    """A finding that names what is not there, if that is the reason.

    kinds: of the exceptions; a reason may begin with the name of one.
    """
    kinds = {*kinds, reason.partition(":")[0]}
    for classes, pattern, remedy in ABSENT:
        if kinds.intersection(classes) or re.search(pattern, reason):
            detail = re.sub(r"^\w+: ", "", line(reason))  # the exception's class says no more
            told = any(words in detail for words in TOLD)
            return CheckResult(
                topic=name, state="missing", detail=detail, remedy="" if told else remedy
            )
    return None


def fine(spec: RewardSpec, trials: list[Trial], first: Round, again: Round) -> CheckResult:
    """Nothing is wrong; what was seen. A warning when all images got the same score.

    They are squares, noise and blank paper: few rewards cannot tell them apart, but one that looks
    for faces cannot, so that this alone stops nothing.
    """
    pairs = sum(bool(trial.says) for trial in trials)
    known = first.known()
    missing = len(first.scores) - len(known)
    right = f"{pairs} fixture{'s' if pairs > 1 else ''} right"
    parts = [right if pairs else f"{len(first.scores)} plain images"]
    parts += [f"{missing} without a score"] if missing else []
    if getattr(spec.reward, "deterministic", True):
        parts.append("repeatable")
    else:
        gap = max(_gap(first, again, row) for row in first.scores)
        parts.append(f"not deterministic: differs by up to {gap:.2g}")
    parts.append(f"scores {min(known):.4g} to {max(known):.4g}")
    same = len(known) > 1 and min(known) == max(known)
    if not same:
        return CheckResult(topic=spec.name, state="ok", detail=", ".join(parts))
    return CheckResult(
        topic=spec.name,
        state="warning",
        detail=f"all images got the same score, {known[0]:.4g}: {', '.join(parts)}",
        remedy="Is its model there, does it read the images? With fixtures() it could show what "
        "it tells apart.",
    )


def _problem(name: str, detail: str, remedy: str) -> CheckResult:
    return CheckResult(topic=name, state="problem", detail=detail, remedy=remedy)


def line(text: str) -> str:
    """On one line; of a long text beginning and end, where what happened and what to do stand."""
    text, half = " ".join(text.split()), LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


# --- Does a reward work? Tried on images of known order, before anything learns from it ------


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of one reward found; findings has at least one line.

    latency: seconds of a call with one image (one group), the median; rate: images a second
    of one large call. Both NaN where they were not measured.
    """

    findings: tuple[CheckResult, ...]
    version: str = ""
    images: int = 0
    latency: float = math.nan
    rate: float = math.nan


def preflight(
    specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], size: tuple[int, int] = SIZE
) -> list[CheckResult]:
    """Try every reward that has something to say about `prompts`, through its own executor.

    A few images each, plain ones of `size`, height and width; random number generators are left
    as they were. -> all findings; those of something wrong or missing concern watched rewards.
    Raises RewardFailure for a trained one that is wrong or cannot be asked.
    """
    learned = {spec.name for spec in trained(specs)}
    findings = [finding for spec in specs for finding in _before_training(spec, prompts, size)]
    for finding in findings:
        if finding.state in ("missing", "problem") and finding.topic in learned:
            raise RewardFailure(
                f"reward {finding.topic!r} does not work, so nothing was trained: "
                f"{finding.detail}. {finding.remedy}".rstrip()
            )
    return findings


def _before_training(
    spec: RewardSpec, prompts: Sequence[PromptRecord], size: tuple[int, int]
) -> tuple[CheckResult, ...]:
    try:
        needed = any(spec.applies(p.text, p.metadata) for p in prompts)
    except UserError as error:  # a server that does not say what its reward needs
        return (failure(spec.name, error),)
    return check_reward(spec, prompts, size=size).findings if needed else ()


def check_reward(
    spec: RewardSpec,
    prompts: Sequence[PromptRecord] = (),
    *,
    like: Reward | None = None,
    calls: int = 0,
    size: tuple[int, int] = SIZE,
) -> Checked:
    """Ask for the same images twice, in another order and company, and judge the answers.

    prompts: to try a reward without fixtures on; none takes generic ones. like: the same reward in
    this process, when `spec` asks a server: its fixtures and version count. calls: with one
    image, to measure the latency. size: of plain images. A reward whose package, weights or
    server is not there is "missing"; raises nothing for what is wrong with it.
    """
    try:
        version = str(getattr(spec.reward, "version", ""))  # a server may not say it
        with untouched_randomness():
            trials = trials_of(spec, spec.reward if like is None else like, prompts, size)
            if not trials:
                return Checked(findings=(_inapplicable(spec),), version=version)
            first, again, latency = _asked(spec, trials, calls)
        wrong = [*unlike(spec, like), *judged(spec, trials, first, again)]
        return Checked(
            findings=tuple(wrong) or (fine(spec, trials, first, again),),
            version=version,
            images=len(first.scores),
            latency=latency,
            rate=again.rate,
        )
    except Exception as error:  # a stranger's code: whatever it raises is what is wrong with it
        return Checked(findings=(failure(spec.name, error),))


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Whatever is drawn inside, the global generators of Python, NumPy and torch stay."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _asked(spec: RewardSpec, trials: list[Trial], calls: int) -> tuple[Round, Round, float]:
    """All images together; backwards, in other company; some alone, for the median seconds."""
    executor, batches = spec.asked_by(), _batches(spec, trials)
    first, again, alone = Round(), Round(), [math.nan]
    for rows in batches:
        first.add(rows, *_ask(executor, trials, rows))
    if not first.known():
        return first, again, math.nan
    for rows in batches:
        back = rows[::-1]
        for part in [back] if spec.whole_groups else [back[:1], back[1:]]:
            if part:
                again.add(part, *_ask(executor, trials, part))
    if calls:
        rows = batches[0] if spec.whole_groups else batches[0][:1]
        alone = [_ask(executor, trials, rows)[1] for _ in range(calls)]
    return first, again, median(alone)


def _batches(spec: RewardSpec, trials: list[Trial]) -> list[list[Row]]:
    """Groups stay whole; all other images of one size go together."""
    together: dict[object, list[Row]] = {}
    for t, trial in enumerate(trials):
        key = t if spec.whole_groups else trial.images.shape[2:]
        together.setdefault(key, []).extend((t, m) for m in range(len(trial.images)))
    return list(together.values())


def _ask(executor: Executor, trials: list[Trial], rows: Sequence[Row]) -> tuple[Answer, float]:
    images = quantise(torch.stack([trials[t].images[m] for t, m in rows]))
    prompts = [trials[t].prompt for t, _ in rows]
    metadata = [dict(trials[t].metadata) for t, _ in rows]
    began = time.perf_counter()
    answer = executor.submit(images, prompts, metadata).result()
    return answer, time.perf_counter() - began


def _inapplicable(spec: RewardSpec) -> CheckResult:
    """It has no fixtures and no prompt; what it says when it is asked all the same."""
    answer = spec.asked_by().submit(torch.zeros(1, 3, 64, 64), [""], [{}]).result()
    reason = re.sub(r"^\w+: ", "", line(answer.reasons.get(0, "")))
    return CheckResult(
        topic=spec.name,
        state="missing",
        detail=reason or "applies to none of the prompts tried, and has no fixtures",
        remedy="" if reason else "Name prompts that it applies to with --prompts.",
    )


# --- Checks of rewards by name: built-in, one's own, or on a server ----------------------------

CALLS = 5  # with one image, for the median
DEADLINE = 60.0  # seconds: a server that loads its model first takes a while


def check_named(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    urls: Sequence[str] = (),
    token: str | None = None,
    deadline: float = DEADLINE,
    prompts: Sequence[PromptRecord] = (),
) -> Checked:
    """Check the reward of that name, here or as the servers at `urls` have it; raises nothing.

    Of a server's reward the version and the required metadata must also be those of the one here,
    if that can be made here. deadline: seconds for each answer of the servers.
    """
    try:
        here = load_reward(name, args)
    except UserError as error:
        if not urls:
            return Checked(findings=(_unmade(name, args, error),))
        here = None
    if urls or here is None:
        return _on_server(name, here, urls, token, deadline, prompts)
    return check_reward(RewardSpec(name=name, reward=here), prompts, calls=CALLS)


def _on_server(
    name: str,
    here: Reward | None,
    urls: Sequence[str],
    token: str | None,
    deadline: float,
    prompts: Sequence[PromptRecord],
) -> Checked:
    from flowrl.scoring.executors.http import HTTPExecutor

    try:
        remote = HTTPExecutor(name, urls, token=token, deadline=deadline)
    except UserError as error:
        return Checked(findings=(failure(name, error),))
    try:
        spec = RewardSpec(name=name, reward=remote, executor=remote)
        return check_reward(spec, prompts, like=here, calls=CALLS)
    finally:
        remote.close()


def _unmade(name: str, args: Mapping[str, Any] | None, error: UserError) -> CheckResult:
    """Why there is no such reward: it lacks a package or arguments, or it is not there at all."""
    found, cause = failure(name, error), error.__cause__
    if found.state == "missing" and (name in BUILT_IN or _lacks_package(name, cause)):
        return found
    if not args and isinstance(error, ArgumentsRefused):
        return CheckResult(
            topic=name,
            state="missing",
            detail=f"needs arguments: {line(str(cause))}",
            remedy=f"flowrl reward-check {name} --args '{{{_wanted(str(cause))}}}'",
        )
    by_hand = isinstance(error, ArgumentsRefused) or cause is None or type(cause) is LookupError
    remedy = "Correct its name or its arguments." if by_hand else "Correct its code."
    return CheckResult(topic=name, state="problem", detail=line(str(error)), remedy=remedy)


def _lacks_package(name: str, cause: BaseException | None) -> bool:
    """Whether one's own module is there, and a package that it needs is not."""
    while cause is not None and not isinstance(cause, ImportError):
        cause = cause.__cause__
    if cause is None or cause.name is None:  # raised by hand: "needs the package ..."
        return cause is not None
    here = f"{name.partition(':')[0]}.".startswith(f"{cause.name}.")
    return isinstance(cause, ModuleNotFoundError) and not here


def _wanted(reason: str) -> str:
    """The arguments that a reason names, as YAML: `server: {model: NAME}`, or 'model'."""
    shown = re.search(r"\w+: \{[^{}]*\}", reason)
    if shown:
        return shown[0]
    names = re.findall(r"'(\w+)'", reason.partition("missing")[2]) or ["NAME"]
    return ", ".join(f"{name}: VALUE" for name in names)

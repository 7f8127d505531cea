"""Does a reward work? Tried on pictures of known order, before anything learns from it."""

import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from flowrl.errors import UserError
from flowrl.findings import Finding
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import Answer, Executor, Reward, RewardFailure
from flowrl.scoring.findings import Round, Row, failure, fine, judged, line, unlike
from flowrl.scoring.pictures import SIZE, Trial, trials_of
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import RewardSpec, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of one reward found; findings has at least one line.

    latency: seconds of a call with one picture (one group), the median; rate: pictures a second
    of one large call. Both NaN where they were not measured.
    """

    findings: tuple[Finding, ...]
    version: str = ""
    pictures: int = 0
    latency: float = math.nan
    rate: float = math.nan


def preflight(
    specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord], size: tuple[int, int] = SIZE
) -> list[Finding]:
    """Try every reward that has something to say about `prompts`, through its own executor.

    A few pictures each, plain ones of `size`, height and width; random number generators are left
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
) -> tuple[Finding, ...]:
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
    """Ask for the same pictures twice, in another order and company, and judge the answers.

    prompts: to try a reward without fixtures on; none takes generic ones. like: the same reward in
    this process, when `spec` asks a server: its fixtures and version count. calls: with one
    picture, to measure the latency. size: of plain pictures. A reward whose package, weights or
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
            pictures=len(first.scores),
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
    """All pictures together; backwards, in other company; some alone, for the median seconds."""
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
    """Groups stay whole; all other pictures of one size go together."""
    together: dict[object, list[Row]] = {}
    for t, trial in enumerate(trials):
        key = t if spec.whole_groups else trial.pictures.shape[2:]
        together.setdefault(key, []).extend((t, m) for m in range(len(trial.pictures)))
    return list(together.values())


def _ask(executor: Executor, trials: list[Trial], rows: Sequence[Row]) -> tuple[Answer, float]:
    images = quantise(torch.stack([trials[t].pictures[m] for t, m in rows]))
    prompts = [trials[t].prompt for t, _ in rows]
    metadata = [dict(trials[t].metadata) for t, _ in rows]
    began = time.perf_counter()
    answer = executor.submit(images, prompts, metadata).result()
    return answer, time.perf_counter() - began


def _inapplicable(spec: RewardSpec) -> Finding:
    """It has no fixtures and no prompt; what it says when it is asked all the same."""
    answer = spec.asked_by().submit(torch.zeros(1, 3, 64, 64), [""], [{}]).result()
    reason = re.sub(r"^\w+: ", "", line(answer.reasons.get(0, "")))
    return Finding(
        topic=spec.name,
        state="missing",
        detail=reason or "applies to none of the prompts tried, and has no fixtures",
        remedy="" if reason else "Name prompts that it applies to with --prompts.",
    )

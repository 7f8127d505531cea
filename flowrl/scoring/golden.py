"""Compare rewards on this machine with reference scores, measured with the real weights.

The images are those of `flowrl reward-check`.
"""

import hashlib
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowrl.errors import CheckResult, UserError
from flowrl.scoring.check import failure_result, trials_of
from flowrl.scoring.executors.base import RewardFailure, ask, to_levels
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import BUILT_IN, RewardSpec, load_reward
from flowrl.utils.files import write_text

# golden.json, and the files that others recorded, in the folder golden beside it.
PATH = Path(importlib.import_module("flowrl_rewards").__path__[0]) / "golden.json"
PACKAGES = ("torch", "transformers", "open-clip-torch", "rapidocr", "pillow", "scikit-image")
SHARE = 0.003  # of the largest score: far above rounding, below what other preprocessing changes
REMEDY = "Record one with flowrl golden --record {name}, where its scores are known to be right."
RECORDED = Path("recorded-scores.json")  # what --record writes, to be added to FOLDER
FOLDER = "rewards/golden"

# A reward's reference scores: version, trials of {prompt, images, scores}; tolerance, made_with
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceComparison:
    """A reward's scores here against its reference scores."""

    result: CheckResult
    measured: Entry | None = None  # None when it could not be called


def compare_all(names: list[str], references: Mapping[str, Entry]) -> list[ReferenceComparison]:
    """Call the named rewards and compare; without names, those that have reference scores.

    A reward without reference scores, or that cannot be called, is "missing", never "ok". Without
    names the other built-in rewards are listed as missing and not called.
    """
    compared = [compare_one(name, references.get(name)) for name in names or references]
    for name in [] if names else lacking(references):
        result = CheckResult(topic=name, state="missing", detail="no reference score yet")
        compared.append(ReferenceComparison(result=result))
    return compared


def compare_one(name: str, entry: Entry | None) -> ReferenceComparison:
    """Compare a reward's scores with those of its entry."""
    try:
        measured = measure(name)
    except (UserError, ValueError) as error:
        return ReferenceComparison(result=failure_result(name, error))
    return ReferenceComparison(result=_judge(name, measured, entry), measured=measured)


def measure(name: str) -> Entry:
    """Return the scores of a reward with its default arguments on its fixtures, or on plain images.

    Raises UserError when it cannot be called or leaves an image without a score.
    """
    reward = load_reward(name)
    trials = trials_of(RewardSpec(name=name, reward=reward), reward, ())
    if not trials:
        raise RewardFailure(f"reward {name!r} has no fixtures and applies to no generic prompt")
    rows = []
    for trial in trials:
        images, count = quantise(trial.images), len(trial.images)
        answer = ask(reward, name, images, [trial.prompt] * count, [trial.metadata] * count)
        for reason in answer.reasons.values():
            raise RewardFailure(f"reward {name!r} gave no score: {reason}")
        levels = to_levels(images).contiguous().numpy().tobytes()
        rows.append(
            {
                "prompt": trial.prompt,
                "images": hashlib.sha256(levels).hexdigest()[:16],
                "scores": [float(f"{score:.7g}") for score in answer.scores.tolist()],
            }
        )
    return {"version": str(getattr(reward, "version", "")), "trials": rows}


def lacking(references: Mapping[str, Entry]) -> list[str]:
    """Return the built-in rewards that have no reference scores."""
    return [name for name in BUILT_IN if name not in references]


def record(path: Path, names: list[str], share: float = SHARE) -> list[CheckResult]:
    """Add what rewards score here to a file, and return "ok" for each, or why it has no score.

    names: of the rewards; none takes the built-in ones that have no reference scores. Each is
    written as soon as it is measured: a machine that runs out of memory keeps the others. Raises
    UserError for a file that is no such file.
    """
    entries, results = read_references(path), []
    for name in names or lacking(shipped_references()):
        found = compare_one(name, None)
        if found.measured is None:
            results.append(found.result)
            continue
        entries[name] = recorded(found.measured, share)
        write_references(path, entries)
        detail = f"recorded in {path}, {found.measured['version'] or 'without a version'}"
        results.append(CheckResult(topic=name, state="ok", detail=detail))
    return results


def recorded(measured: Entry, share: float = SHARE) -> Entry:
    """Return an entry for the file: the measured scores, a tolerance and package versions."""
    largest = max(abs(score) for row in measured["trials"] for score in row["scores"])
    return {
        "version": measured["version"],
        "tolerance": float(f"{share * largest:.2g}"),
        "made_with": {name: found for name in PACKAGES if (found := _installed(name))},
        "trials": measured["trials"],
    }


def shipped_references() -> dict[str, Entry]:
    """Return flowrl's own entries: of PATH, and of each file in the folder beside it, by name."""
    found = read_references(PATH)
    for path in sorted(PATH.with_suffix("").glob("*.json")):
        found |= read_references(path)
    return found


def read_references(path: Path) -> dict[str, Entry]:
    """Return the entries of a file by reward; none when there is no file. Raises UserError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        for entry in found.values():
            _check(entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is no file of reference scores ({type(error).__name__}: {error}): expected "
            "one that flowrl golden --record wrote"
        ) from error
    return found


def _check(entry: Entry) -> None:
    """Raise KeyError, TypeError or ValueError for an invalid entry."""
    parts = [entry["tolerance"], *(score for row in entry["trials"] for score in row["scores"])]
    if not all(math.isfinite(part) for part in parts):
        raise ValueError("a number is not finite")
    texts = [*_parts(entry, "version"), *_parts(entry, "images")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a version is no text")


def write_references(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write all entries, atomically, by name."""
    write_text(path, json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def _judge(name: str, measured: Entry, entry: Entry | None) -> CheckResult:
    if entry is None:
        return _without(name, "no reference score yet, so nothing was compared")
    for key, what in (("version", "of another version"), ("images", "of other images")):
        here, there = _parts(measured, key), _parts(entry, key)
        if here != there:
            return _without(
                name, f"no reference score yet: the one there is {what} ({there[0]}, not {here[0]})"
            )
    pairs = [
        (row["prompt"], score, reference)
        for row, known in zip(measured["trials"], entry["trials"], strict=True)
        for score, reference in zip(row["scores"], known["scores"], strict=True)
    ]
    prompt, score, reference = max(pairs, key=lambda pair: _gap(*pair[1:]))
    if _gap(score, reference) > entry["tolerance"]:
        wanted = f"{reference:.6g} within {entry['tolerance']:g}"
        made = ", ".join(f"{k} {v}" for k, v in entry.get("made_with", {}).items())
        detail = f"{score:.6g} for {prompt!r}, expected {wanted}"
        remedy = f"The reference score was made with {made}: look for what differs here."
        return CheckResult(topic=name, state="problem", detail=detail, remedy=remedy)
    detail = f"{len(pairs)} scores agree, the largest difference is {_gap(score, reference):.2g}"
    return CheckResult(topic=name, state="ok", detail=detail)


def _parts(entry: Entry, key: str) -> list[str]:
    if key == "version":
        return [entry["version"]]
    return [f"{row['images']} with {row['prompt']!r}" for row in entry["trials"]]


def _gap(score: float, reference: float) -> float:
    gap = abs(score - reference)
    return gap if math.isfinite(gap) else math.inf


def _without(name: str, detail: str) -> CheckResult:
    return CheckResult(topic=name, state="missing", detail=detail, remedy=REMEDY.format(name=name))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

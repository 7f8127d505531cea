"""Score image files, grouped by prompt and read by size, with reasons for missing scores."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.images import to_tensor

BATCH = 16  # images held at a time, where nothing compares them


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFiles:
    """Scores of image files, and why some are missing."""

    # Per image: path, prompt, and a score by reward name, NaN where missing.
    rows: list[dict[str, Any]]
    missing: list[str]  # a sentence for each reward, and for each file that cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An image file, its prompt, and the scores found so far."""

    path: Path
    prompt: str
    metadata: dict
    scores: dict[str, float] = field(default_factory=dict)


Opened = tuple[ImageFile, Image.Image]


class _Missing:
    """The first reason why each reward lacks a score, and how many scores it lacks."""

    def __init__(self):
        self._reasons: dict[tuple[str, str], dict[object, str]] = {}

    def add(self, source: str, unit: str, which: object, sentence: str) -> None:
        """Record a missing score of `source`, a reward or a file; unit: the plural of `which`."""
        self._reasons.setdefault((source, unit), {}).setdefault(which, sentence)

    def lines(self) -> list[str]:
        return [
            next(iter(reasons.values()))
            + (f"; {unit} without a score: {len(reasons)}" if len(reasons) > 1 else "")
            for (_, unit), reasons in self._reasons.items()
        ]


def score_files(specs: Sequence[RewardSpec], files: Sequence[ImageFile]) -> ScoredFiles:
    """Score every file with every reward; images of one prompt and metadata are one group."""
    groups: dict[str, list[ImageFile]] = {}
    for file in files:
        key = json.dumps([file.prompt, file.metadata], sort_keys=True, default=repr)
        groups.setdefault(key, []).append(file)
    missing = _Missing()
    for group in groups.values():
        _score_group(specs, group, missing)
    rows = [
        {"image": str(file.path), "prompt": file.prompt}
        | {spec.name: file.scores.get(spec.name, math.nan) for spec in specs}
        for file in files
    ]
    return ScoredFiles(rows=rows, missing=missing.lines())


def _score_group(specs: Sequence[RewardSpec], group: list[ImageFile], missing: _Missing) -> None:
    """Score all images of one prompt with every reward."""
    fits = []
    for spec in specs:
        if why := _why_not(spec, group[0]):
            _refuse(spec, group, why, missing)
        else:
            fits.append(spec)
    if single := [spec for spec in fits if not spec.whole_groups]:
        for start in range(0, len(group), BATCH):
            for part in _by_size(_read(group[start : start + BATCH], missing)):
                for spec in single:
                    _ask(spec, part, missing)
    if comparing := [spec for spec in fits if spec.whole_groups]:
        _compare(comparing, group, missing)


def _compare(specs: Sequence[RewardSpec], group: list[ImageFile], missing: _Missing) -> None:
    parts = _by_size(_read(group, missing))
    why = ""
    if len(parts) > 1:
        sizes = ", ".join("{} x {}".format(*part[0][1].size) for part in parts)
        why = f"it compares images of one size, and these are {sizes}"
    elif sum(map(len, parts)) < 2:
        why = "it compares the images of a prompt: give two or more"
    for spec in specs:
        if why:
            _refuse(spec, group, why, missing)
        else:
            _ask(spec, parts[0], missing)


def _why_not(spec: RewardSpec, file: ImageFile) -> str:
    """Return why a reward has no score for a prompt, "" if it may have one."""
    try:
        if spec.applies(file.prompt, file.metadata):
            return ""
    except UserError as error:
        return _bare(spec, error)
    needs = [k for k in getattr(spec.reward, "required_metadata", ()) if k not in file.metadata]
    if needs:
        return f"it needs {', '.join(needs)} in its metadata: give --prompts a file that has them"
    return "there is nothing in it that it could judge"


def _refuse(spec: RewardSpec, group: list[ImageFile], why: str, missing: _Missing) -> None:
    sentence = f"reward {spec.name!r} does not apply to the prompt {group[0].prompt!r}: {why}"
    missing.add(spec.name, "prompts", group[0].path, sentence)


def _ask(spec: RewardSpec, part: list[Opened], missing: _Missing) -> None:
    """Score images of one prompt and one size."""
    files, images = [file for file, _ in part], to_tensor([image for _, image in part])
    prompts, metadata = [file.prompt for file in files], [file.metadata for file in files]
    try:
        answer = spec.get_executor().submit(quantise(images), prompts, metadata).result()
    except UserError as error:
        reasons = dict.fromkeys(range(len(files)), _bare(spec, error))
    else:
        reasons = answer.reasons
        for file, value in zip(files, answer.scores.tolist(), strict=True):
            file.scores[spec.name] = value
    for row, reason in reasons.items():
        path, prompt = files[row].path, files[row].prompt
        sentence = f"reward {spec.name!r} has no score for {path}, prompt {prompt!r}: {reason}"
        missing.add(spec.name, "images", path, sentence)


def _bare(spec: RewardSpec, error: UserError) -> str:
    """Return the error's sentence without the name of the reward."""
    return str(error).removeprefix(f"reward {spec.name!r}").lstrip(": ")


def _read(files: Sequence[ImageFile], missing: _Missing) -> Iterator[Opened]:
    """Yield the files that can be read, with their images."""
    for file in files:
        try:
            with Image.open(file.path) as image:
                yield file, image.convert("RGB")
        except Exception as error:  # Pillow has no common class for what it finds in broken files
            missing.add(str(file.path), "", file.path, f"cannot read {file.path}: {error}")


def _by_size(images: Iterator[Opened]) -> list[list[Opened]]:
    parts: dict[tuple[int, int], list[Opened]] = {}
    for file, image in images:
        parts.setdefault(image.size, []).append((file, image))
    return list(parts.values())

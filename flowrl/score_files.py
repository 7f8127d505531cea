"""What `flowrl score` does: scores of picture files."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.utils.images import to_tensor

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
BATCH = 16  # pictures that are held at a time, where nothing compares them


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """rows: of each picture its path, its prompt and a score for each reward, NaN where there is
    none. missing: why, a line for each reward, and for each file that cannot be read."""

    rows: list[dict[str, Any]]
    missing: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    prompt: str
    metadata: dict
    scores: dict[str, float] = field(default_factory=dict)


class _Missing:
    """Why scores are missing: of each reward the first reason, and how often it has none."""

    def __init__(self):
        self._told: dict[tuple[str, str], dict[object, str]] = {}

    def add(self, source: str, unit: str, which: object, sentence: str) -> None:
        """source: a reward or a file; unit: what `which` is one of, in the plural."""
        self._told.setdefault((source, unit), {}).setdefault(which, sentence)

    def lines(self) -> list[str]:
        return [
            next(iter(told.values()))
            + (f"; {unit} without a score: {len(told)}" if len(told) > 1 else "")
            for (_, unit), told in self._told.items()
        ]


def score_images(
    pictures: Sequence[Path],
    rewards: Sequence[str],
    prompts: str | None,
    args: Sequence[Mapping[str, Any] | None] = (),
) -> Scored:
    """Scores of files, or of the pictures in folders.

    prompts: one prompt for all, or a file or built-in split with one for each picture in the
    order of their names; pictures of one prompt are one group, for rewards that compare them.
    args: for each reward, or none at all. Raises UserError when there are more prompts than
    pictures or fewer, and for a reward that cannot be made.
    """
    paths = _picture_files(pictures)
    records = _prompts_for(prompts or "", len(paths))
    specs = [
        RewardSpec(name=name, reward=load_reward(name, its))
        for name, its in zip(rewards, args or [None] * len(rewards), strict=True)
    ]
    files = [
        _File(path=path, prompt=text, metadata=metadata)
        for path, (text, metadata) in zip(paths, records, strict=True)
    ]
    missing = _Missing()
    for group in _by_prompt(files):
        _score_group(specs, group, missing)
    rows = [
        {"picture": str(file.path), "prompt": file.prompt}
        | {name: file.scores.get(name, math.nan) for name in rewards}
        for file in files
    ]
    return Scored(rows=rows, missing=missing.lines())


def _by_prompt(files: Sequence[_File]) -> list[list[_File]]:
    groups: dict[str, list[_File]] = {}
    for file in files:
        key = json.dumps([file.prompt, file.metadata], sort_keys=True, default=repr)
        groups.setdefault(key, []).append(file)
    return list(groups.values())


def _score_group(specs: Sequence[RewardSpec], group: list[_File], missing: _Missing) -> None:
    """Every reward, on all pictures of one prompt."""
    fits = []
    for spec in specs:
        if why := _why_not(spec, group[0]):
            _refuse(spec, group, why, missing)
        else:
            fits.append(spec)
    if alone := [spec for spec in fits if not spec.whole_groups]:
        for start in range(0, len(group), BATCH):
            for part in _by_size(_read(group[start : start + BATCH], missing)):
                for spec in alone:
                    _ask(spec, part, missing)
    if together := [spec for spec in fits if spec.whole_groups]:
        _compare(together, group, missing)


def _compare(specs: Sequence[RewardSpec], group: list[_File], missing: _Missing) -> None:
    parts = _by_size(_read(group, missing))
    why = ""
    if len(parts) > 1:
        sizes = ", ".join("{} x {}".format(*part[0][1].size) for part in parts)
        why = f"it compares pictures of one size, and these are {sizes}"
    elif sum(map(len, parts)) < 2:
        why = "it compares the pictures of a prompt: give two or more"
    for spec in specs:
        if why:
            _refuse(spec, group, why, missing)
        else:
            _ask(spec, parts[0], missing)


def _why_not(spec: RewardSpec, file: _File) -> str:
    """Why a reward has no score for a prompt, "" if it may have one."""
    try:
        if spec.applies(file.prompt, file.metadata):
            return ""
    except UserError as error:
        return _bare(spec, error)
    needs = [k for k in getattr(spec.reward, "required_metadata", ()) if k not in file.metadata]
    if needs:
        return f"it needs {', '.join(needs)} in its metadata: give --prompts a file that has them"
    return "there is nothing in it that it could judge"


def _refuse(spec: RewardSpec, group: list[_File], why: str, missing: _Missing) -> None:
    told = f"reward {spec.name!r} does not apply to the prompt {group[0].prompt!r}: {why}"
    missing.add(spec.name, "prompts", group[0].path, told)


def _ask(spec: RewardSpec, part: list[tuple[_File, Image.Image]], missing: _Missing) -> None:
    """Scores of pictures of one prompt and one size."""
    files, images = [file for file, _ in part], to_tensor([image for _, image in part])
    prompts, metadata = [file.prompt for file in files], [file.metadata for file in files]
    try:
        answer = spec.asked_by().submit(quantise(images), prompts, metadata).result()
    except UserError as error:
        reasons = dict.fromkeys(range(len(files)), _bare(spec, error))
    else:
        reasons = answer.reasons
        for file, value in zip(files, answer.scores.tolist(), strict=True):
            file.scores[spec.name] = value
    for row, reason in reasons.items():
        file = files[row]
        told = (
            f"reward {spec.name!r} has no score for {file.path}, prompt {file.prompt!r}: {reason}"
        )
        missing.add(spec.name, "pictures", file.path, told)


def _bare(spec: RewardSpec, error: UserError) -> str:
    """What it says, without the name of the reward."""
    return str(error).removeprefix(f"reward {spec.name!r}").lstrip(": ")


def _read(files: Sequence[_File], missing: _Missing) -> Iterator[tuple[_File, Image.Image]]:
    """Those that can be read, and what they show."""
    for file in files:
        try:
            with Image.open(file.path) as image:
                yield file, image.convert("RGB")
        except Exception as error:  # Pillow has no common class for what it finds in broken files
            missing.add(str(file.path), "", file.path, f"cannot read {file.path}: {error}")


def _by_size(
    read: Iterator[tuple[_File, Image.Image]],
) -> list[list[tuple[_File, Image.Image]]]:
    parts: dict[tuple[int, int], list[tuple[_File, Image.Image]]] = {}
    for file, image in read:
        parts.setdefault(image.size, []).append((file, image))
    return list(parts.values())


def _picture_files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURES)
        elif source.is_file():
            found.append(source)
        else:
            raise UserError(f"no picture at {source}")
    if not found:
        raise UserError(f"no pictures in {', '.join(map(str, sources))}: looked for {PICTURES}")
    return found


def _prompts_for(source: str, count: int) -> list[tuple[str, dict]]:
    if not source.startswith("tiny:") and not Path(source).suffix and not Path(source).is_file():
        return [(source, {})] * count
    records = load_prompts(source, limit=count if source.startswith("tiny:") else None)
    if len(records) != count:
        raise UserError(f"{source} has {len(records)} prompts for {count} pictures")
    return [(record.text, record.metadata) for record in records]

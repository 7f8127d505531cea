"""Score image files, grouped by prompt and read by size, with reasons for missing scores."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.prompts.sources import file_rows, parse_nested
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.images import read_image, to_tensor
from flowrl.utils.untrusted import is_readable

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
METADATA, SAMPLES = "metadata.jsonl", "samples"  # of a prompt's folder in GenEval's layout
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


# --- which images there are, and what was asked of them ------------------------------------------


def labelled_images(source: Path) -> list[ImageFile] | None:
    """Return the images of a folder that says their prompts; None for one that does not.

    GenEval's layout is `00000/metadata.jsonl` with `00000/samples/*.png`, or one such subfolder.
    Otherwise `metadata.jsonl` or `metadata.csv` has a row an image with `file_name`
    and `prompt` (or `text`); other keys are metadata.

    Raises UserError for labels that are malformed, and for files that are missing or lie outside.
    """
    if (source / SAMPLES).is_dir() and (source / METADATA).is_file():
        return _of_prompt(source)
    folders = [p for p in sorted(source.iterdir()) if p.is_dir() and p.name.isdigit()]
    if folders and any((p / SAMPLES).is_dir() for p in folders):
        return [image for folder in folders for image in _of_prompt(folder)]
    for name in (METADATA, "metadata.csv"):
        if (source / name).is_file():
            rows = file_rows(source / name, "metadata")
            return [_of_row(source, row, where) for where, row in rows]
    return None


def prompted_images(folder: Path) -> list[ImageFile]:
    """Return the images of a folder with prompts. Raises UserError for a folder without."""
    images = labelled_images(folder) if folder.is_dir() else None
    if not images:
        raise UserError(
            f"{folder} has no images with prompts: expected GenEval's layout, "
            "00000/metadata.jsonl and 00000/samples/0000.png, and so on for each prompt, or "
            "metadata.jsonl with file_name and prompt"
        )
    return images


def _of_prompt(folder: Path) -> list[ImageFile]:
    """Return the images of one folder of GenEval's layout; grid.png beside them is none."""
    path = folder / METADATA
    rows = [row for _, row in file_rows(path, "metadata")] if path.is_file() else []
    row = rows[0] if len(rows) == 1 and isinstance(rows[0], dict) else {}
    if not isinstance(text := row.pop("prompt", None), str):
        raise UserError(f"{path} must hold one JSON object with a text under 'prompt'")
    images = [p for p in sorted((folder / SAMPLES).glob("*")) if p.suffix.lower() in SUFFIXES]
    for image in images:
        _check_image(image, folder, str(folder / SAMPLES))
    return [ImageFile(path=path, prompt=text, metadata=row) for path in images]


def _of_row(folder: Path, row: Any, where: str) -> ImageFile:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, got {str(row)[:40]}")
    row = dict(row)
    name = row.pop("file_name", None)
    texts = [row.pop(key) for key in ("prompt", "text") if isinstance(row.get(key), str)]
    if not name or not texts:
        raise UserError(f"{where}: expected 'file_name' and 'prompt', got {', '.join(row) or '{}'}")
    path = folder / str(name)
    _check_image(path, folder, where)
    nested = {key: parse_nested(value) for key, value in row.items()}
    return ImageFile(path=path, prompt=texts[0], metadata=nested)


def _check_image(path: Path, folder: Path, where: str) -> None:
    if not is_readable(path, inside=folder):
        raise UserError(f"{where}: {path} is no image file inside of {folder}")


def plain_images(source: Path) -> list[Path]:
    """Return an image file, or those of a folder, in the order of their names."""
    if source.is_dir():
        return sorted(p for p in source.iterdir() if p.suffix.lower() in SUFFIXES)
    if not source.is_file():
        raise UserError(f"no image at {source}")
    return [source]


# --- their scores ---------------------------------------------------------------------------------

Opened = tuple[ImageFile, Image.Image]
Missing = dict[str, str]  # by reward or file, the first reason why a score is missing


def score_files(specs: Sequence[RewardSpec], files: Sequence[ImageFile]) -> ScoredFiles:
    """Score every file with every reward; images of one prompt, metadata and size are a group."""
    specs = [replace(spec, held_out=True) for spec in specs]  # one that fails stops no other
    whole = any(spec.whole_groups for spec in specs)
    groups: dict[str, list[ImageFile]] = {}
    for file in files:
        key = json.dumps([file.prompt, file.metadata], sort_keys=True, default=repr)
        groups.setdefault(key, []).append(file)
    missing: Missing = {}
    for group in groups.values():
        size = len(group) if whole else BATCH
        for start in range(0, len(group), size):
            for part in _by_size(_read(group[start : start + size], missing)):
                _score_part(specs, part, missing)
    rows: list[dict[str, Any]] = [
        {"image": str(file.path), "prompt": file.prompt}
        | {spec.name: file.scores.get(spec.name, math.nan) for spec in specs}
        for file in files
    ]
    for spec in specs:
        count = sum(math.isnan(row[spec.name]) for row in rows)
        if count > 1 and spec.name in missing:
            missing[spec.name] += f"; images without a score: {count}"
    return ScoredFiles(rows=rows, missing=list(missing.values()))


def best_image(
    spec: RewardSpec, images: Sequence[Image.Image], record: PromptRecord
) -> tuple[int, float]:
    """Return the number and the score of the image that a reward scores best.

    A reward with a negative weight prefers low scores. Raises UserError if no image has a score.
    """
    texts, metadata = [record.text] * len(images), [record.metadata] * len(images)
    # Held out, so that a failure is a missing score with its reason.
    judge = replace(spec, held_out=True)
    result = score([judge], to_tensor(images), texts, metadata, group=[0] * len(images))
    scores = result.scores[:, 0].tolist()
    scored = [i for i, score in enumerate(scores) if not math.isnan(score)]
    if not scored:
        reason = result.errors.get(spec.name, "no image has a score")
        raise UserError(f"{spec.name}, prompt {record.text!r}: {reason}")
    best = max(scored, key=lambda i: scores[i] * spec.weight)
    return best, scores[best]


def _score_part(specs: Sequence[RewardSpec], part: list[Opened], missing: Missing) -> None:
    """Score images of one prompt and one size."""
    files, pixels = [file for file, _ in part], to_tensor([image for _, image in part])
    first, count = files[0], len(files)
    alone = "it compares images of one prompt and size: give two or more" if count == 1 else None
    reasons: dict[str, str] = {}
    fits = []
    for spec in specs:
        why = spec.misfit(first.prompt, first.metadata) or (alone if spec.whole_groups else None)
        if why is None:
            fits.append(spec)
        else:
            reasons[spec.name] = why
    prompts, metadata = [first.prompt] * count, [first.metadata] * count
    result = score(fits, pixels, prompts, metadata, [0] * count)
    for column, spec in enumerate(fits):
        for file, value in zip(files, result.scores[:, column].tolist(), strict=True):
            file.scores[spec.name] = value
    for name, why in (reasons | result.errors).items():
        sentence = f"reward {name!r} cannot score {first.path}, prompt {first.prompt!r}: {why}"
        missing.setdefault(name, sentence)


def _read(files: Sequence[ImageFile], missing: Missing) -> Iterator[Opened]:
    """Yield the files that can be read, with their images."""
    for file in files:
        try:
            yield file, read_image(file.path)
        except Exception as error:  # Pillow has no common class for what it finds in broken files
            missing[str(file.path)] = f"cannot read {file.path}: {error}"


def _by_size(images: Iterator[Opened]) -> list[list[Opened]]:
    parts: dict[tuple[int, int], list[Opened]] = {}
    for file, image in images:
        parts.setdefault(image.size, []).append((file, image))
    return list(parts.values())


def images_with_prompts(sources: Sequence[Path], prompts: str) -> list[ImageFile]:
    """Return the images in their order, those that nothing labels with `prompts`."""
    listed: list[ImageFile | Path] = []
    for source in sources:
        labelled = labelled_images(source) if source.is_dir() else None
        listed += plain_images(source) if labelled is None else labelled
    if not listed:
        raise UserError(f"no images in {', '.join(map(str, sources))}: looked for {SUFFIXES}")
    bare = [image for image in listed if isinstance(image, Path)]
    if prompts and not bare:
        raise UserError(f"{sources[0]} says its prompts itself: leave --prompt and --prompts out")
    records = iter(_prompts_for(prompts, len(bare)) if bare else [])

    def label(path: Path) -> ImageFile:
        text, metadata = next(records)
        return ImageFile(path=path, prompt=text, metadata=metadata)

    return [label(image) if isinstance(image, Path) else image for image in listed]


def _prompts_for(source: str, count: int) -> list[tuple[str, dict]]:
    """Return a prompt and its metadata for each of `count` images."""
    if not source.startswith("tiny:") and not Path(source).suffix and not Path(source).is_file():
        return [(source, {})] * count
    records = load_prompts(source, limit=count if source.startswith("tiny:") else None)
    if len(records) != count:
        raise UserError(f"{source} has {len(records)} prompts for {count} images")
    return [(record.text, record.metadata) for record in records]

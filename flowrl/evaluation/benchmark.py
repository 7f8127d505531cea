"""Benchmarks over folders of images: GenEval as published, and any prompts with any rewards."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.scoring.files import ImageFile, ScoredFiles, labelled_images, score_files
from flowrl.scoring.spec import RewardSpec, closing, load_reward
from flowrl.utils.files import write_text
from flowrl.utils.images import read_image, to_tensor
from flowrl.utils.progress import Steps

GENEVAL = "geneval"
# Benchmarks on the Hub by their usual names; any other name is a file.
NAMES = {"drawbench": "hf:sayakpaul/drawbench:train:Prompts"}
RESULTS, SCORES = "results.jsonl", "scores.csv"
KINDS = ("tag", "category", "Category", "kind")  # metadata keys of the kind of a prompt
DETECTOR = {"detector": "mask2former", "colors": "clip"}  # as published, in another framework

Row = dict[str, Any]


def benchmark_prompts(name: str) -> list[PromptRecord]:
    """Return the prompts of a benchmark: a name of NAMES, or a file, see `load_prompts`."""
    return load_prompts(NAMES.get(name, name))


# --- GenEval --------------------------------------------------------------------------------------


def geneval_prompts(
    source: str | Path | None, args: Mapping[str, Any] | None = None
) -> list[PromptRecord]:
    """Return prompts in GenEval's form, which the judge with these arguments can judge.

    Raises UserError for None, naming where the 553 published ones are, and for other prompts.
    """
    if source is None:
        raise UserError(
            "give GenEval's prompts with --prompts: evaluation_metadata.jsonl, in the folder "
            "prompts of https://github.com/djghosh13/geneval"
        )
    records = load_prompts(source)
    geneval_judge(args, [(record.text, record.metadata) for record in records], str(source))
    return records


def geneval_judge(
    args: Mapping[str, Any] | None, prompts: Sequence[tuple[str, Mapping[str, Any]]], where: str
) -> Any:
    """Return the reward that applies GenEval's published rule, see `judge_geneval`.

    prompts: texts and metadata of the images to judge.

    Raises UserError, beginning with `where`, for prompts that it cannot judge.
    """
    options: Any = {k: v for k, v in (args or DETECTOR).items() if k != "mode"}
    reward: Any = load_reward(GENEVAL, options | {"mode": "official"})
    for prompt, metadata in prompts:
        if not reward.applies(prompt, metadata) or "tag" not in metadata:
            raise UserError(
                f"{where}: the prompt {prompt!r} has no tag and include of GenEval, as in "
                '{"tag": "single_object", "include": [{"class": "cat", "count": 1}], "prompt": ...}'
            )
        try:
            reward.check(prompt, metadata)
        except ValueError as error:
            raise UserError(f"{where}: the prompt {prompt!r}: {error}") from error
    return reward


def judge_geneval(folder: Path, args: Mapping[str, Any] | None = None) -> list[Row]:
    """Judge a folder in GenEval's layout by the published rule; return the rows of results.jsonl.

    args: of the reward `geneval`: detector, colors, thresholds; DETECTOR by default.

    Raises UserError for a folder of another form and for prompts that the detector cannot judge.
    """
    images = layout_images(folder)
    reward = geneval_judge(args, [(i.prompt, i.metadata) for i in images], str(folder))
    rows = []
    with Steps("judging", len(images)) as steps:
        for image in images:
            rows.append(_judged(reward, image))
            steps.advance()
    return rows


def layout_images(folder: Path) -> list[ImageFile]:
    """Return the images of a folder with their prompts. Raises UserError without prompts."""
    images = labelled_images(folder) if folder.is_dir() else None
    if not images:
        raise UserError(
            f"{folder} is not in GenEval's layout: expected 00000/metadata.jsonl and "
            "00000/samples/0000.png, and so on for each prompt"
        )
    return images


def _judged(reward: Any, image: ImageFile) -> Row:
    try:
        pixels = to_tensor([read_image(image.path)])
    except Exception as error:  # Pillow has no common class for the errors of broken files
        verdict: Row = {"correct": None, "reason": f"cannot be read: {error}", "details": {}}
    else:
        (verdict,) = reward.verdicts(pixels, [image.metadata])
    metadata = image.metadata | {"prompt": image.prompt}
    return {
        "filename": str(image.path),
        "tag": image.metadata["tag"],
        "prompt": image.prompt,
        "correct": verdict["correct"],
        "reason": verdict["reason"],
        "metadata": json.dumps(metadata),
        "details": json.dumps(verdict["details"]),
    }


def write_results(rows: Sequence[Row], path: Path) -> Path:
    """Write GenEval's results.jsonl, a row an image."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def geneval_table(rows: Sequence[Row]) -> list[Row]:
    """Return the accuracy of each task, and their mean as published.

    The mean is over tasks, not images. Images without a verdict are counted and left out.
    """
    tasks: dict[str, list[bool]] = {}
    for row in rows:
        verdicts = tasks.setdefault(row["tag"], [])
        if row["correct"] is not None:
            verdicts.append(bool(row["correct"]))
    table: list[Row] = [
        {
            "task": tag,
            "accuracy": _mean(verdicts),
            "correct": sum(verdicts),
            "images": len(verdicts),
        }
        for tag, verdicts in tasks.items()
    ]
    judged = [verdict for verdicts in tasks.values() for verdict in verdicts]
    overall = {
        "task": "mean of tasks",
        "accuracy": _mean([row["accuracy"] for row in table]),
        "correct": sum(judged),
        "images": len(judged),
    }
    return [*table, overall]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# --- any prompts, any rewards ---------------------------------------------------------------------


def score_folder(folder: Path, specs: Sequence[RewardSpec]) -> ScoredFiles:
    """Score a folder of images with prompts; write `scores.csv` into it."""
    with closing(specs):
        scored = score_files(specs, layout_images(folder))
    write_csv(folder / SCORES, scored.rows)
    return scored


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as csv, missing scores as empty cells."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(name) for name in columns)
        writer.writerow(["" if c is None or c != c else c for c in cells])
    write_text(path, text.getvalue())


def kind_table(folder: Path, rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Return the mean scores of each kind of prompt, and of all; rows: of `score_files`."""
    kinds = {str(image.path): kind_of(image.metadata) for image in layout_images(folder)}
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(kinds[row["image"]], []).append(row)
    parts = sorted(by_kind.items()) if set(by_kind) != {""} else []
    return [
        {"prompts": kind}
        | {name: _mean([row[name] for row in part if row[name] == row[name]]) for name in names}
        | {"images": len(part)}
        for kind, part in [*((kind or "other", part) for kind, part in parts), ("all", rows)]
    ]


def kind_of(metadata: Mapping[str, Any]) -> str:
    """Return the kind of a prompt, "" where its metadata have none."""
    return next((str(metadata[key]) for key in KINDS if metadata.get(key)), "")

"""How far two judges of GenEval agree on the same images, task by task."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.benchmark import DETECTOR, GENEVAL, Row, judge_geneval, layout_images
from flowrl.scoring.files import score_files
from flowrl.scoring.spec import RewardSpec

Verdicts = dict[str, bool | None]  # by file, None where there is none


def verdicts(judge: str, folder: Path, args: Mapping[str, Any] | None = None) -> Verdicts:
    """Return the verdict of a judge for each image of a folder in GenEval's layout.

    judge: the address of a reward server in mode official, a results.jsonl of anybody's, or the
    name of a detector, with `args` of the reward geneval. Raises UserError for none of these.
    """
    if args and (judge.startswith("http") or judge.endswith(".jsonl")):
        raise UserError(f"--args are given for {judge}, whose verdicts are made already")
    if judge.startswith(("http://", "https://")):
        return _of_server(judge, folder)
    if judge.endswith(".jsonl"):
        return _of_file(Path(judge))
    given = dict(args or {}) | {"detector": judge}
    if judge == DETECTOR["detector"]:
        given = {"colors": DETECTOR["colors"]} | given
    return {_place(row["filename"]): row["correct"] for row in judge_geneval(folder, given)}


def _of_file(path: Path) -> Verdicts:
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return {
            _place(row["filename"]): None if row["correct"] is None else bool(row["correct"])
            for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no results.jsonl of GenEval, a row an image with filename and correct: "
            f"{error}"
        ) from error


def _of_server(url: str, folder: Path) -> Verdicts:
    from flowrl.scoring.executors.http import HTTPExecutor

    images = layout_images(folder)
    for name in ("geneval_mmdet", "geneval_official", GENEVAL):
        executor = HTTPExecutor(name, [url])
        try:
            version = executor.version
        except UserError as error:
            if "does not serve it" not in str(error):
                raise
            version = ""
        if version:
            if "official" not in version.split("/"):
                executor.close()
                raise UserError(
                    f"{url} serves {name} in version {version}, expected geneval in mode official"
                )
            spec = RewardSpec(name=name, reward=executor, executor=executor)
            try:
                rows = score_files([spec], images).rows
            finally:
                executor.close()
            return {_place(row["image"]): _whole(row[name], url) for row in rows}
        executor.close()
    raise UserError(f"{url} serves no geneval_mmdet, geneval_official or geneval")


def _whole(score: float, url: str) -> bool | None:
    if score != score:
        return None
    if score not in (0.0, 1.0):
        raise UserError(f"{url} answered {score:g}: serve geneval in mode official, 0 or 1")
    return bool(score)


def _place(filename: str) -> str:
    """Return 00003/samples/0001.png: the folder above may be elsewhere on another machine."""
    return "/".join(Path(filename).parts[-3:])


def agreement(folder: Path, first: Verdicts, second: Verdicts) -> list[Row]:
    """Return how far two judges agree on each task, and on all images.

    kappa is Cohen's (1960): agreement beyond what their shares of right images make likely.

    Raises UserError when there is no image that both have judged.
    """
    found: dict[str, list[tuple[bool, bool]]] = {}
    for image in layout_images(folder):
        a, b = (own.get(_place(str(image.path))) for own in (first, second))
        if a is not None and b is not None:
            found.setdefault(str(image.metadata.get("tag")), []).append((a, b))
    if not found:
        raise UserError(f"no image of {folder} was judged by both")
    rows = [_compared(task, pairs) for task, pairs in found.items()]
    return [*rows, _compared("all", [pair for pairs in found.values() for pair in pairs])]


def _compared(task: str, pairs: Sequence[tuple[bool, bool]]) -> Row:
    count = len(pairs)
    same = sum(a == b for a, b in pairs) / count
    a, b = (sum(pair[i] for pair in pairs) / count for i in (0, 1))
    chance = a * b + (1 - a) * (1 - b)
    return {
        "task": task,
        "images": count,
        "A": a,
        "B": b,
        "B - A": b - a,
        "agreement": same,
        "kappa": (same - chance) / (1 - chance) if chance < 1 else float("nan"),
        "only A": sum(one and not other for one, other in pairs),
        "only B": sum(other and not one for one, other in pairs),
    }

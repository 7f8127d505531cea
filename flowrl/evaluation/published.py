"""Published benchmarks by name: their prompt files as authors publish them, and their judges."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import UserError
from flowrl.prompts.sources import check_row, file_rows
from flowrl.utils.untrusted import parse_json, read_text

Row = dict[str, Any]


class Published(NamedTuple):
    """How a benchmark is published, and what judges it."""

    url: str  # of the folder that holds the files
    files: Sequence[str]  # together they are the benchmark; their suffix is the form
    count: int  # prompts in all files
    prompt: str  # column
    kind: str  # column of the kind of a prompt; "" where files are kinds, or there are none
    needs: tuple[str, ...] = ()  # other columns that may not be empty
    judge: str = ""  # a reward; "" where people judged
    args: Mapping[str, Any] = {}


GITHUB = "https://github.com"
GRAPH = "flowrl_rewards.chat.published:QuestionGraph"
EXPLAINED = "flowrl_rewards.chat.published:ExplainedJudge"
COMPBENCH = "color shape texture spatial 3d_spatial numeracy non_spatial complex".split()
# Read in the projects of these addresses, but for DPG's table (its columns are those that ELLA's
# compute_dpg_bench.py names) and DrawBench's (those that programs on GitHub read).
# fmt: off
PUBLISHED = {
    "geneval": Published(
        f"{GITHUB}/djghosh13/geneval/tree/main/prompts", ("evaluation_metadata.jsonl",), 553,
        "prompt", "tag", ("include",), "geneval",
        # The detector is as published, in another framework.
        {"mode": "official", "detector": "mask2former", "colors": "clip"}),
    "geneval2": Published(
        f"{GITHUB}/facebookresearch/GenEval2", ("geneval2_data.jsonl",), 800, "prompt",
        "atom_count", ("vqa_list",), "vlm_questions", {"mean": "geometric"}),
    "dpg": Published(
        f"{GITHUB}/TencentQQGYLab/ELLA/tree/main/dpg_bench", ("dpg_bench.csv",), 1065, "text", "",
        ("item_id", "proposition_id", "dependency", "question_natural_language"), GRAPH),
    "oneig": Published(
        f"{GITHUB}/OneIG-Bench/OneIG-Benchmark", ("OneIG-Bench.csv",), 1120, "prompt_en",
        "category", ("id",), GRAPH, {"chain": False}),
    "t2i_compbench": Published(
        f"{GITHUB}/Karine-Huang/T2I-CompBench/tree/main/examples/dataset",
        tuple(f"{kind}_val.txt" for kind in COMPBENCH), 2400, "prompt", "", (),
        "vlm_judge", {"rubric": "t2i_compbench"}),
    "wise": Published(
        f"{GITHUB}/PKU-YuanGroup/WISE/tree/main/WISE_legacy/data",
        ("cultural_common_sense.json", "spatio-temporal_reasoning.json", "natural_science.json"),
        1000, "Prompt", "Category", ("Explanation",), EXPLAINED, {"rubric": "wise"}),
    "drawbench": Published(
        "https://huggingface.co/datasets/sayakpaul/drawbench", ("drawbench.csv",), 200, "Prompts",
        "Category"),
    "partiprompts": Published(
        f"{GITHUB}/google-research/parti", ("PartiPrompts.tsv",), 1632, "Prompt", "Category"),
}
# fmt: on
# OneIG-Bench asks questions about three of its categories, in files beside its table.
QUESTIONS = {"Anime_Stylization": "anime", "Portrait": "human", "General_Object": "object"}


def published_rows(name: str, source: Path | None) -> list[Row]:
    """Read a published file, or all files of a folder; return rows with `prompt` and `tag`.

    Other columns are metadata; DPG-Bench and OneIG-Bench get `question_graph`. Raises UserError
    without a source, and for a file of another form, with its line and what is expected.
    """
    spec, rows = PUBLISHED[name], list[Row]()
    expected = f"expected {', '.join(spec.files)} as in {spec.url}"
    if source is None:
        raise UserError(f"give --prompts, the file or its folder: {expected}")
    for path in [source / file for file in spec.files] if source.is_dir() else [source]:
        if path.suffix.lower() != Path(spec.files[0]).suffix or not path.is_file():
            raise UserError(f"{path} is missing, or has another form, {expected}")
        if not (raw := list(file_rows(path))):
            raise UserError(f"{path} is empty, {expected}")
        for (where, row), column in product(raw, (spec.prompt, spec.kind, *spec.needs)):
            if column and (not isinstance(row, dict) or row.get(column) in (None, "")):
                raise UserError(f"{where}: nothing under {column!r}, {expected}")
        for where, row in _grouped(raw) if name == "dpg" else raw:
            kind = row.pop(spec.kind) if spec.kind else path.stem.removesuffix("_val")
            kind = f"{kind:02d}" if isinstance(kind, int) else kind
            if name == "oneig" and kind in QUESTIONS:
                row |= _questions(path.parent, QUESTIONS[kind], row["id"])
            tag = {"tag": kind} if spec.kind or len(spec.files) > 1 else {}
            rows.append(check_row({"prompt": row.pop(spec.prompt)} | tag | row, where))
    return rows


# --- question graphs ------------------------------------------------------------------------------


def _grouped(rows: list[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield a row for each prompt of DPG-Bench, whose rows are questions."""
    items: dict[str, list[tuple[str, Row]]] = {}
    for where, row in rows:
        items.setdefault(row["item_id"], []).append((where, row))
    for name, members in items.items():
        numbered = {row["proposition_id"]: row for _, row in members}
        questions = {n: row["question_natural_language"] for n, row in numbered.items()}
        parents = {n: row["dependency"].split(",") for n, row in numbered.items()}
        where, first = members[0]
        graph = _graph(questions, parents, f"{where}, item_id {name!r}")
        yield where, {"text": first["text"], "item_id": name} | graph


def _questions(folder: Path, name: str, entry: str) -> Row:
    """Return the question graph of a prompt of OneIG-Bench."""
    path = folder / f"scripts/alignment/Q_D/{name}.json"
    where = f"{path}, entry {entry!r}"
    try:
        parts = _question_file(path)[entry]
        return _graph(json.loads(parts["question"]), json.loads(parts["dependency"]), where)
    except (OSError, LookupError, TypeError, ValueError) as error:
        expected = f"expected 'question' and 'dependency' as in {PUBLISHED['oneig'].url}"
        raise UserError(f"{where}: {type(error).__name__}: {error}, {expected}") from error


@functools.cache  # a prompt takes one entry of it
def _question_file(path: Path) -> Any:
    return parse_json(read_text(path), str(path))


def _graph(questions: Mapping, parents: Mapping, where: str) -> Row:
    """Return questions with the places of their parents in the list.

    0 is no parent, and one that has no row is left out: OneIG-Bench's script passes over it, and
    copies of DPG-Bench lack their first row, as its script skips it.
    """
    try:
        places = {int(number): place for place, number in enumerate(questions)}
        graph = [
            (question, [places[int(p)] for p in parents[number] if int(p) in places])
            for number, question in questions.items()
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{where}: dependencies are numbers, as '1, 2', got {error}") from error
    return {"question_graph": graph}

"""GenEval's layout, its results and its table; folders of any prompts."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.backbones.lora_formats import LoRA
from flowrl.cli import main
from flowrl.errors import UserError
from flowrl.evaluation.benchmark import kind_table, score_folder, write_csv
from flowrl.evaluation.drawing import Drawing, draw_prompts
from flowrl.prompts.records import load_prompts
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.tiny.world import GENEVAL_TAGS, split_prompts

TINY = "{detector: tiny, colors: null}"  # arguments of the judge
JUDGE = RewardSpec(name="geneval", reward=load_reward("geneval", {"mode": "official"}))


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """GenEval's layout, drawn by the tiny pipeline: a prompt of each task, two images each."""
    root = tmp_path_factory.mktemp("geneval")
    rows = [split_prompts(tag, "test")[0] for tag in GENEVAL_TAGS]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = run(
        "benchmark", "geneval", "tiny-sd3", "--prompts", root / "rows.jsonl",
        "--args", TINY, "-o", root / "images", "--per-prompt", 2, "--steps", 8,
        "--guidance", 1, "--max-sequence-length", 12, "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    return root / "images", rows


def test_the_drawn_layout_is_genevals_and_goes_on_where_it_ended(drawn):
    folder, rows = drawn
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [f"{i:05d}" for i in range(6)]
    for index, row in enumerate(rows):
        assert json.loads((folder / f"{index:05d}" / "metadata.jsonl").read_text()) == row
        names = sorted(p.name for p in (folder / f"{index:05d}" / "samples").iterdir())
        assert names == ["0000.png", "0001.png"]
    first, flipped, whole = (folder / f"0000{i}/samples/0000.png" for i in range(3))
    before, stamp = [path.read_bytes() for path in (first, flipped)], whole.stat().st_mtime_ns
    first.unlink()
    data = bytearray(before[1])
    data[random.Random(0).randrange(8, len(data) - 12)] ^= 1
    flipped.write_bytes(data)
    drawing = Drawing("tiny-sd3", guidance=1, steps=8, max_sequence_length=12, device="cpu")
    prompts = load_prompts(folder.parent / "rows.jsonl")
    draw_prompts(drawing, prompts, folder, per_prompt=2, seed=0)
    assert [path.read_bytes() for path in (first, flipped)] == before
    assert whole.stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="drawn.json"):
        draw_prompts(drawing, prompts, folder, per_prompt=2, seed=1)


def test_a_folder_of_images_has_the_table_that_was_printed_when_it_was_drawn(drawn, capsys):
    folder, _ = drawn
    lines = (folder / "scores.csv").read_text().splitlines()
    assert lines[0] == "image,prompt,geneval" and len(lines) == 13
    right = sum(float(line.rpartition(",")[2]) for line in lines[1:])
    assert 0 < right < 12
    assert run("benchmark", "geneval", folder, "--args", TINY, "--json") == 0
    table = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [row["prompts"] for row in table] == [*sorted(GENEVAL_TAGS), "all", "mean of kinds"]
    assert table[-2]["geneval"] == pytest.approx(right / 12)


def test_kinds_count_alike_however_many_images_they_have(tmp_path):
    for index, kind in enumerate(["colors", "colors", "colors", "counting"]):
        (tmp_path / f"{index:05d}" / "samples").mkdir(parents=True)
        row = {"prompt": "a cat", "category": kind}
        (tmp_path / f"{index:05d}" / "metadata.jsonl").write_text(json.dumps(row))
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index:05d}/samples/0000.png")
    names = [str(tmp_path / f"{index:05d}/samples/0000.png") for index in range(4)]
    scores = [1.0, 1.0, math.nan, 0.0]
    rows = [{"image": name, "r": value} for name, value in zip(names, scores, strict=True)]
    table = {row["prompts"]: row["r"] for row in kind_table(tmp_path, rows, ["r"])}
    assert table == {"colors": 1.0, "counting": 0.0, "all": 2 / 3, "mean of kinds": 0.5}
    write_csv(tmp_path / "scores.csv", rows)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert [line.rpartition(",")[2] for line in lines] == ["r", "1.0", "1.0", "", "0.0"]


def test_what_cannot_be_judged_is_missing_or_refused(tmp_path):
    with pytest.raises(UserError, match="expected GenEval's layout"):
        score_folder(tmp_path, [JUDGE])
    (tmp_path / "00000" / "samples").mkdir(parents=True)
    picture = tmp_path / "00000" / "samples" / "0000.png"
    picture.write_bytes(b"no image")
    row = split_prompts("colors", "test")[0]
    (tmp_path / "00000" / "metadata.jsonl").write_text(json.dumps(row))
    scored = score_folder(tmp_path, [JUDGE])
    assert math.isnan(scored.rows[0]["geneval"]) and "cannot read" in scored.missing[0]
    assert run("benchmark", "geneval", tmp_path, "--args", TINY) == 1
    Image.new("RGB", (8, 8)).save(picture)
    zebra = row | {"include": [{"class": "zebra", "count": 1, "color": "red"}]}
    for asked, word in ((zebra, "zebra"), ({"prompt": "a cat"}, "tag")):
        (tmp_path / "00000" / "metadata.jsonl").write_text(json.dumps(asked))
        scored = score_folder(tmp_path, [JUDGE])
        assert math.isnan(scored.rows[0]["geneval"]) and word in scored.missing[0]
    (tmp_path / "zebra.jsonl").write_text(json.dumps(zebra))
    code = run(
        "benchmark", "geneval", "tiny-sd3", "--prompts", tmp_path / "zebra.jsonl",
        "--args", TINY, "-o", tmp_path / "images",
    )  # fmt: skip
    assert code == 1 and not (tmp_path / "images").exists()


def test_a_prompts_own_negative_is_drawn_with_and_written_beside_its_images(monkeypatch, tmp_path):
    asked = []

    class Canvas:
        def identity(self):
            return {}

        def image(self, prompt, seed, negative=None):
            asked.append((prompt, seed, negative))
            return Image.new("RGB", (8, 8))

    monkeypatch.setattr("flowrl.evaluation.drawing.Drawing", lambda *_, **__: Canvas())
    rows = [{"prompt": "a cat", "negative_prompt": "blurry"}, {"prompt": "a dog"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, expected = str(tmp_path / "rows.jsonl"), [("a cat", 3, "blurry"), ("a dog", 3, None)]
    assert run("sample", "tiny-sd3", "--prompts", source, "--seed", 3, "-o", tmp_path / "a") == 0
    assert asked == expected
    asked.clear()
    canvas: Any = Canvas()
    draw_prompts(canvas, load_prompts(source), tmp_path / "b", per_prompt=1, seed=3)
    assert asked == expected
    first, second = (json.loads((tmp_path / f"b/0000{i}/metadata.jsonl").read_text()) for i in "01")
    assert first == {"prompt": "a cat", "negative": "blurry"} and second == {"prompt": "a dog"}
    # Images to compare have other noise each; those of a benchmark begin anew at each prompt.
    for distinct, seeds in ((True, [3, 4, 5, 6]), (False, [3, 4, 3, 4])):
        asked.clear()
        how = {"per_prompt": 2, "seed": 3, "distinct_noise": distinct}
        draw_prompts(canvas, load_prompts(source), tmp_path / str(distinct), **how)
        assert [seed for _, seed, _ in asked] == seeds


def test_images_belong_to_the_tensors_of_a_lora_and_not_to_its_file():
    def identity(value: float, name: str):
        drawing = object.__new__(Drawing)  # without its pipeline
        drawing.options, drawing.call = {}, {}
        state = {"a.lora_A.weight": torch.full((1, 2), value), "a.lora_B.weight": torch.ones(2, 1)}
        drawing.lora = LoRA(name=name, path=Path(name), make="PEFT", scales={"a": 1.0}, state=state)
        return drawing.identity()

    assert identity(1.0, "a") == identity(1.0, "b") != identity(2.0, "a")

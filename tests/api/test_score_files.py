"""Scores of image files, as `flowrl score` gives them."""

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from flowrl.api import score
from flowrl.errors import UserError

REWARDS = """
class Bright:
    required_metadata = ("tag",)

    def __call__(self, images, prompts, metadata):
        if "bad" in prompts:
            raise RuntimeError("no face")
        return images.mean((1, 2, 3))


class Sorted:
    scope = "group"

    def __call__(self, images, prompts, metadata):
        assert len(set(prompts)) == 1
        return images.mean((1, 2, 3)).argsort().argsort().float()


def absent(images, prompts, metadata):
    raise ImportError("no such package")
"""
BRIGHT, SORTED = "file_rewards:Bright", "file_rewards:Sorted"


@pytest.fixture
def grey(tmp_path, monkeypatch):
    """(name, level, side) -> an image."""
    (tmp_path / "file_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, level: int, side: int = 8) -> Path:
        Image.new("RGB", (side, side), (level,) * 3).save(tmp_path / name)
        return tmp_path / name

    return make


def prompts_of(folder: Path, *records: dict) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_images_of_one_prompt_and_size_are_compared(grey, tmp_path):
    # Images of one prompt are compared and no others.
    names = [("a.png", 9), ("b.png", 200), ("c.png", 3), ("d.png", 100)]
    paths = [grey(*name) for name in names]
    prompts = prompts_of(tmp_path, *({"prompt": p} for p in ("cat", "dog", "cat", "dog")))
    scored = score(paths, [SORTED], prompts)
    assert [row[SORTED] for row in scored.rows] == [1.0, 1.0, 0.0, 0.0]
    assert not scored.missing
    # Images of all sizes are scored and only those of one are compared.
    paths = [grey("a.png", 0, 8), grey("b.png", 255, 16)]
    scored = score(paths, ["brightness", SORTED], "a cat")
    assert [row["brightness"] for row in scored.rows] == [0.0, 1.0]
    assert all(math.isnan(row[SORTED]) for row in scored.rows)
    assert "a cat" in scored.missing[0] and SORTED in scored.missing[0]
    # One image is compared with nothing.
    scored = score([grey("a.png", 0)], [SORTED], "a cat")
    assert math.isnan(scored.rows[0][SORTED])
    assert "give two or more" in scored.missing[0]


def test_what_fails_or_does_not_apply_is_missing_with_a_reason_and_the_rest_is_scored(
    grey, tmp_path
):
    paths = [grey(f"{n}.png", 255) for n in range(5)]
    records = [
        {"prompt": "bad", "tag": "x"},
        {"prompt": "a cat"},
        {"prompt": "good", "tag": "x"},
        {"prompt": "a dog"},
        {"prompt": "bad", "tag": "y"},
    ]
    scored = score(paths, [BRIGHT, "brightness"], prompts_of(tmp_path, *records))
    assert [row["brightness"] for row in scored.rows] == [1.0] * 5
    assert [row[BRIGHT] == 1.0 for row in scored.rows] == [False, False, True, False, False]
    (line,) = scored.missing
    assert all(word in line for word in (BRIGHT, str(paths[0]), "'bad'", "no face", "score: 4"))
    assert "file_rewards.py:" in line
    (unfit,) = score(paths[1:2], [BRIGHT], "a cat").missing
    assert "'a cat'" in unfit and "tag" in unfit


def test_a_reward_that_cannot_run_is_told(grey):
    # A reward that cannot run leaves the others their scores.
    name = "file_rewards:absent"
    scored = score([grey("a.png", 255)], [name, "brightness"], "a cat")
    assert math.isnan(scored.rows[0][name]) and scored.rows[0]["brightness"] == 1.0
    assert "no such package" in scored.missing[0]


def test_a_file_that_is_no_image_is_told_and_the_rest_is_scored(grey, tmp_path):
    good = grey("b.png", 255)
    (tmp_path / "a.png").write_bytes(good.read_bytes()[:50])
    scored = score([tmp_path], ["brightness", BRIGHT], None)
    assert math.isnan(scored.rows[0]["brightness"]) and scored.rows[1]["brightness"] == 1.0
    assert any(line.startswith(f"cannot read {tmp_path / 'a.png'}: ") for line in scored.missing)


def test_a_folder_in_genevals_layout_says_its_prompts_and_its_grid_is_no_image(grey, tmp_path):
    for index, tag in enumerate(["counting", "colors"]):
        (tmp_path / f"{index:05d}" / "samples").mkdir(parents=True)
        row = {"tag": tag, "include": [], "prompt": f"prompt {index}"}
        (tmp_path / f"{index:05d}" / "metadata.jsonl").write_text(json.dumps(row))
        grey(f"{index:05d}/grid.png", 0)
        for number in range(2):
            grey(f"{index:05d}/samples/{number:04d}.png", 51 * index)
        (tmp_path / f"{index:05d}" / "samples" / "notes.txt").write_text("no image")
    found = score([tmp_path], [BRIGHT], None).rows
    assert [row["prompt"] for row in found] == ["prompt 0"] * 2 + ["prompt 1"] * 2
    assert [row[BRIGHT] for row in found] == pytest.approx([0, 0, 0.2, 0.2])
    assert [row["image"] for row in score([tmp_path / "00001"], [BRIGHT], None).rows] == [
        row["image"] for row in found[2:]
    ]
    with pytest.raises(UserError, match="says its prompts itself"):
        score([tmp_path], [BRIGHT], "a cat")
    (tmp_path / "00001" / "metadata.jsonl").write_text("{]")
    with pytest.raises(UserError, match=r"00001/metadata.jsonl, line 1 is no JSON"):
        score([tmp_path], [BRIGHT], None)


def test_images_of_one_prompt_with_other_metadata_are_no_group(grey, tmp_path):
    rows = [{"file_name": f"{n}.png", "prompt": "a cat", "tag": str(n // 2)} for n in range(4)]
    for row in rows:
        grey(row["file_name"], 60 - 10 * int(row["file_name"][0]))
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row[SORTED] for row in score([tmp_path], [SORTED], None).rows] == [1, 0, 1, 0]


def test_a_folder_with_metadata_is_read_by_its_rows(grey, tmp_path):
    grey("b.png", 255), grey("a.png", 0)
    rows = [{"file_name": "b.png", "prompt": "bright", "tag": "x"}]
    (tmp_path / "metadata.jsonl").write_text(json.dumps(rows[0]))
    (row,) = score([tmp_path], [BRIGHT], None).rows
    assert row["prompt"] == "bright" and row[BRIGHT] == 1
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text('file_name,text,tag\na.png,"dark, very",x\n')
    (row,) = score([tmp_path], [BRIGHT], None).rows
    assert row["prompt"] == "dark, very" and row[BRIGHT] == 0
    (tmp_path / "metadata.csv").write_text("file_name,text\nc.png,dark\n")
    with pytest.raises(UserError, match=r"metadata.csv, line 2: .*c.png"):
        score([tmp_path], [BRIGHT], None)
    (tmp_path / "metadata.csv").write_text("image,label\nc.png,dark\n")
    with pytest.raises(UserError, match="expected 'file_name' and 'prompt', got image, label"):
        score([tmp_path], [BRIGHT], None)

"""Pairs from any table: what is stored decodes to them; bad ones are named, and mended."""

import io
import json
import random
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.api import collect_pairs
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.offline.pairs import read_pairs
from flowrl.tiny.world import split_prompts
from flowrl.utils.images import to_tensor
from scripts.pretrain_tiny.draw import draw


@pytest.fixture(scope="module")
def config(tiny_config):
    return tiny_config(
        rollout={"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 2}
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def stored_images(tmp_path):
    """Four images of the tiny world as files, and their pixels."""
    prompts = split_prompts("colors", "train")[:4]
    drawn = [Image.fromarray(draw(p, random.Random(i))) for i, p in enumerate(prompts)]
    (tmp_path / "p").mkdir()
    for i, image in enumerate(drawn):
        image.save(tmp_path / "p" / f"{i}.png")
    return tmp_path, [p["prompt"] for p in prompts[:2]], to_tensor(drawn)


def write_file(folder, rows) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join((json.dumps(row) if row else "") + "\n" for row in rows))
    return path


def test_pairs_become_groups_of_two_that_decode_to_the_images(config, stored_images, load_tiny):
    folder, (a, b), images = stored_images
    source = write_file(
        folder,
        [
            {"prompt": a, "chosen": "p/0.png", "rejected": "p/1.png", "annotator": 7},
            {"prompt": b, "chosen": "p/3.png", "rejected": "p/2.png", "negative": "dull"},
        ],
    )
    pipeline = load_tiny()
    (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=pipeline)
    assert row == {"groups": 2, "images": 4, "preference": 0.5} and not left_out
    store = open_dataset(folder / "s")
    assert store.scores.tolist() == [[1.0], [0.0], [1.0], [0.0]]
    first, second = (group.record for group in store.groups)
    assert (first.text, first.metadata, second.negative) == (a, {"annotator": 7}, "dull")
    backbone, given = PipelineBackbone(pipeline), images[[0, 1, 3, 2]]
    x0 = store.latents(torch.arange(4))
    assert torch.equal(x0, backbone.encode_images(given))
    error = (backbone.decode(x0) - given).abs().flatten(1).mean(1)
    assert error.max() < 0.02, error
    before = files(folder / "s")
    collect_pairs(config, source, folder / "s", pipeline=pipeline)
    assert files(folder / "s") == before


def test_bad_pairs_are_named_by_their_lines_and_taken_in_when_mended(
    config, stored_images, load_tiny
):
    """First all are bad, then three of four, then none."""
    folder, _, _ = stored_images
    (folder / "broken.png").write_bytes((folder / "p" / "0.png").read_bytes()[:60])
    shutil.copy(folder / "p" / "0.png", folder / "twin.png")
    rows = [
        {"prompt": "a", "chosen": "p/0.png", "rejected": "q/9.png"},
        None,
        {"prompt": "b", "chosen": "p/0.png", "rejected": "twin.png"},
        {"prompt": "c", "chosen": "broken.png", "rejected": "p/0.png"},
        {"prompt": "d", "chosen": "q/2.png", "rejected": "q/3.png"},
    ]
    source, pipeline = write_file(folder, rows), load_tiny()
    with pytest.raises(UserError, match="none of the 4 pairs .*line 1"):
        collect_pairs(config, source, folder / "s", pipeline=pipeline)
    shutil.copytree(folder / "p", folder / "q")
    expected = [(1, "rejected image .*9.png"), (3, "the same image"), (4, "chosen .*broken.png")]
    for _ in range(2):  # the bad ones are named each time
        (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=pipeline)
        assert row["groups"] == 1 and open_dataset(folder / "s").groups[0].record.text == "d"
        for text, (line, reason) in zip(left_out, expected, strict=True):
            assert re.search(f"pairs.jsonl, line {line}: .*{reason}", text), text
    for name in ("q/9.png", "twin.png", "broken.png"):
        shutil.copy(folder / "p" / "1.png", folder / name)
    (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=pipeline)
    assert row["groups"] == 4 and not left_out
    before = files(folder / "s")
    shutil.rmtree(folder / "q")  # encoded, hence not needed
    assert collect_pairs(config, source, folder / "s", pipeline=pipeline)[1] == []
    assert files(folder / "s") == before


# --- tables of others ----------------------------------------------------------------------------


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(path: Path, columns: dict) -> str:
    table = pytest.importorskip("pyarrow").table(columns)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return str(path)


def levels(pair) -> tuple:
    """The brightness of the chosen and the rejected image."""
    return tuple(cell.open().convert("L").getpixel((0, 0)) for cell in (pair.chosen, pair.rejected))


GOOD, BAD = png(255), png(0)
LABELLED = {"prompt": "caption", "first": "jpg_0", "second": "jpg_1", "label": "label_0"}


def test_labelled_images_in_a_table_as_of_pick_a_pic(tmp_path):
    columns = {
        "caption": ["a cat", "a dog", "a cow", None, "a hen"],
        "jpg_0": [BAD, GOOD, GOOD, GOOD, GOOD], "jpg_1": [GOOD, BAD, BAD, BAD, BAD],
        "label_0": [0.0, 1.0, 0.5, 1.0, None], "ranking_id": [7, 8, 9, 10, 11],
        "created_at": [datetime(2022, 11, 12)] * 5, "best": ["u", None, "u", "u", "u"],
    }  # fmt: skip
    pairs, left_out = read_pairs(parquet(tmp_path / "a.parquet", columns), LABELLED)
    assert [pair.record.text for pair in pairs] == ["a cat", "a dog"]
    assert [levels(pair) for pair in pairs] == [(255, 0)] * 2
    assert pairs[0].record.metadata == {"ranking_id": 7, "best": "u"}
    assert pairs[1].record.metadata == {"ranking_id": 8}
    assert [re.search(r"row (\d): (\w+)", line).groups() for line in left_out] == [
        ("3", "label_0"), ("4", "caption"), ("5", "label_0")
    ]  # fmt: skip


MEDIA = "supervision.{}.media.0.path"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "a cat", "path1": "good.png", "path2": "bad.png", "sure": 0.9},
         {"prompt": "text", "chosen": "path1", "rejected": "path2"}),
        ({"input": {"prompt": "a cat"}, "sure": 0.9,
          "supervision": {k: {"media": [{"path": f"{n}.png"}]}
                          for k, n in (("chosen", "good"), ("rejected", "bad"))}},
         {"prompt": "input.prompt", "chosen": MEDIA.format("chosen"),
          "rejected": MEDIA.format("rejected")}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_paths_in_any_columns_as_of_hpdv3_and_flow_factory(tmp_path, row, columns, suffix):
    (tmp_path / "good.png").write_bytes(GOOD)
    (tmp_path / "bad.png").write_bytes(BAD)
    source = tmp_path / f"pairs{suffix}"
    source.write_text(json.dumps([row] if suffix == ".json" else row))
    (pair,), _ = read_pairs(str(source), columns)
    assert (pair.record.text, pair.record.metadata) == ("a cat", {"sure": 0.9})
    assert levels(pair) == (255, 0)

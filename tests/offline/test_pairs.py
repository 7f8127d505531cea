"""Pairs from image files: what is stored decodes to them; bad ones are named, and mended."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.api import collect_pairs
from flowrl.backbones.sd3 import SD3
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.offline.pairs import read_pairs
from flowrl.offline.writer import load_image
from flowrl.tiny.draw import draw
from flowrl.tiny.world import split_prompts
from flowrl.utils.images import to_tensor


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
    backbone, given = SD3(pipeline), images[[0, 1, 3, 2]]
    x0 = store.latents(torch.arange(4))
    assert torch.equal(x0, backbone.encode_images(given))
    error = (backbone.decode(x0) - given).abs().flatten(1).mean(1)
    assert error.max() < 0.02, error
    before = files(folder / "s")
    collect_pairs(config, source, folder / "s", pipeline=pipeline)
    assert files(folder / "s") == before


def test_a_bad_pair_is_named_by_its_line_and_left_out(config, stored_images, load_tiny):
    folder, (a, b), _ = stored_images
    (folder / "broken.png").write_bytes((folder / "p" / "0.png").read_bytes()[:60])
    source = write_file(
        folder,
        [
            {"prompt": a, "chosen": "p/0.png", "rejected": "p/9.png"},
            None,
            {"prompt": a, "chosen": "p/0.png", "rejected": "p/0.png"},
            {"prompt": a, "chosen": "broken.png", "rejected": "p/0.png"},
            {"prompt": b, "chosen": "p/1.png", "rejected": "p/0.png"},
        ],
    )
    (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=load_tiny())
    assert row["groups"] == 1 and open_dataset(folder / "s").groups[0].record.text == b
    expected = [
        (1, "the rejected image .*9.png is not there"),
        (3, "chosen and rejected are the same image"),
        (4, "the chosen image .*broken.png cannot be read"),
    ]
    for text, (line, reason) in zip(left_out, expected, strict=True):
        assert re.search(f"pairs.jsonl, line {line}: {reason}", text), text


def test_a_file_of_pairs_without_any_is_refused(config, stored_images, load_tiny):
    folder, (a, _), _ = stored_images
    source = write_file(folder, [{"prompt": a, "chosen": "p/0.png", "rejected": "gone.png"}])
    with pytest.raises(UserError, match="none of the 1 pairs can be used; the first: .*line 1"):
        collect_pairs(config, source, folder / "s", pipeline=load_tiny())
    source = write_file(folder, [None, {"prompt": a, "chosen": "p/0.png"}])
    with pytest.raises(UserError, match='line 2: expected the paths .* "chosen" and "rejected"'):
        read_pairs(source)
    with pytest.raises(UserError, match="expected a .jsonl, .json or .parquet file"):
        read_pairs(folder / "pairs.csv")


def test_files_that_are_mended_are_taken_in(config, stored_images, load_tiny):
    """First all are missing, then one pair, then none."""
    folder, (a, b), _ = stored_images
    rows = [
        {"prompt": a, "chosen": "q/0.png", "rejected": "q/1.png"},
        {"prompt": b, "chosen": "q/2.png", "rejected": "q/3.png"},
    ]
    source, pipeline = write_file(folder, rows), load_tiny()
    with pytest.raises(UserError, match="none of the 2 pairs"):
        collect_pairs(config, source, folder / "s", pipeline=pipeline)
    (folder / "q").mkdir()
    for i in range(2):
        shutil.copy(folder / "p" / f"{i}.png", folder / "q")
    for _ in range(2):  # the one that is still missing is named each time
        (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=pipeline)
        assert row["groups"] == 1 and len(left_out) == 1 and "line 2" in left_out[0]
    for i in (2, 3):
        shutil.copy(folder / "p" / f"{i}.png", folder / "q")
    (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=pipeline)
    assert row["groups"] == 2 and not left_out
    before = files(folder / "s")
    shutil.rmtree(folder / "q")  # encoded, hence not needed
    assert collect_pairs(config, source, folder / "s", pipeline=pipeline)[1] == []
    assert files(folder / "s") == before


def test_paths_can_be_mended_in_the_file_of_pairs_while_nothing_is_stored(
    config, stored_images, load_tiny
):
    folder, (a, _), _ = stored_images
    source = write_file(folder, [{"prompt": a, "chosen": "0.png", "rejected": "1.png"}])
    with pytest.raises(UserError, match="none of the 1 pairs"):
        collect_pairs(config, source, folder / "s", pipeline=load_tiny())
    source = write_file(folder, [{"prompt": a, "chosen": "p/0.png", "rejected": "p/1.png"}])
    (row,), left_out = collect_pairs(config, source, folder / "s", pipeline=load_tiny())
    assert row["groups"] == 1 and not left_out


def test_another_image_under_the_same_name_makes_another_store(config, stored_images, load_tiny):
    folder, (a, _), _ = stored_images
    source = write_file(folder, [{"prompt": a, "chosen": "p/0.png", "rejected": "p/1.png"}])
    pipeline = load_tiny()
    collect_pairs(config, source, folder / "s", pipeline=pipeline)
    before = open_dataset(folder / "s")
    known = before.latents(torch.arange(2))
    shutil.copy(folder / "p" / "2.png", folder / "p" / "0.png")
    collect_pairs(config, source, folder / "s", pipeline=pipeline)
    after = open_dataset(folder / "s")
    assert after.identity != before.identity
    now = after.latents(torch.arange(2))
    assert [torch.equal(*pair) for pair in zip(now, known, strict=True)] == [False, True]


def test_images_are_scaled_to_cover_the_size_and_cut_evenly(tmp_path):
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    wide.save(tmp_path / "wide.png")
    image = load_image(tmp_path / "wide.png", (32, 32))
    assert image.size == (32, 32)
    assert image.getpixel((16, 16)) == (0, 0, 255) == image.getpixel((3, 30))
    clear = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    assert load_image(tmp_path / "clear.png", (32, 32)).getpixel((0, 0)) == (255, 255, 255)

"""A store gives back what was put in, bit for bit; what is half written or damaged is not read."""

import json
import math
from dataclasses import replace

import pytest
import torch

from flowrl.errors import UserError
from flowrl.offline.format import (
    README,
    DatasetMetadata,
    StoredImage,
    append_shard,
    create_dataset,
    finished_shards,
    latents_file,
    open_dataset,
    rows_file,
)
from flowrl.prompts.records import PromptRecord

SHAPE = [3, 2, 2]
HOSTILE = [
    'a "quoted" \\ star</script><b>&amp;',
    "two\nlines\r\nand\u2028more\x85here\x00",
    '{"prompt": "null"}',
    "ein Stern für 猫 🌟",
]


def about(**changes) -> DatasetMetadata:
    made = DatasetMetadata(
        pipeline="models/one",
        backbone="sd3",
        latent_shape=SHAPE,
        dtype="float32",
        sigmas=torch.linspace(1, 0, 4).tolist(),
        rewards=[{"name": n, "version": "1", "weight": 1.0} for n in ("ocr", "geneval")],
        recipe={"rollout": {"num_inference_steps": 3}},
    )
    return replace(made, **changes)


def record(text: str, **options) -> PromptRecord:
    return PromptRecord(uid=f"uid of {text[:3]!r}", text=text, **options)


def images(count=4, *, shard=0, scores=None, records=None):
    """Groups of two."""
    return [
        StoredImage(
            record=(records or [record("a star"), record("a ring")])[i // 2],
            group=shard * 2 + i // 2,
            image=i % 2,
            valid=True,
            scores=scores[i] if scores else [0.1 * i, 1.0],
            seed=0,
            iteration=shard,
            root=i % 2,
        )
        for i in range(count)
    ]


def latents(count=4, dtype=torch.float32):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.fixture
def folder(tmp_path):
    create_dataset(tmp_path / "store", about())
    return tmp_path / "store"


def test_latents_come_back_bit_for_bit_in_any_order(tmp_path):
    for name in ("float32", "bfloat16", "float16"):
        dtype, folder = getattr(torch, name), tmp_path / name
        create_dataset(folder, about(dtype=name))
        parts = [latents(4, dtype), latents(2, dtype)]
        for shard, x0 in enumerate(parts):
            append_shard(folder, shard, x0, images(len(x0), shard=shard))
        store = open_dataset(folder)
        order = torch.tensor([5, 0, 3, 3, 4])
        found = store.latents(order)
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), torch.cat(parts)[order].view(torch.uint8))
        assert store.metadata == about(dtype=name) and len(store) == 6


def test_a_missing_score_is_null_in_the_file_and_nan_again_when_read(folder):
    scores = [[0.1, math.nan], [math.inf, 0.0], [-math.inf, 1 / 3], [1e-30, -2.5]]
    append_shard(folder, 0, latents(), images(scores=scores))
    rows = [json.loads(line) for line in rows_file(folder, 0).read_text().splitlines()]
    assert [row["reward/geneval"] for row in rows][:2] == [None, 0.0]
    assert [row["reward/ocr"] for row in rows][1:3] == [None, None]
    expected = torch.tensor(scores)
    expected[~expected.isfinite()] = math.nan
    assert torch.equal(open_dataset(folder).scores.nan_to_num(9), expected.nan_to_num(9))


def test_no_prompt_can_break_a_row(folder):
    for shard, text in enumerate(HOSTILE):
        asked = record(text, negative=text, metadata={text: [text, {"n": None}], "count": 2})
        append_shard(folder, shard, latents(2), images(2, shard=shard, records=[asked]))
        assert rows_file(folder, shard).read_bytes().isascii()
        assert rows_file(folder, shard).read_bytes().count(b"\n") == 2
        assert open_dataset(folder).groups[shard].record == asked


def test_groups_are_whole_in_order_and_may_lose_rows(folder):
    for shard in (1, 0):  # an interrupted collection may fill a gap later
        append_shard(folder, shard, latents(), images(shard=shard))
    groups = open_dataset(folder).groups
    assert [group.images for group in groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert len({group.key for group in groups}) == 4
    assert groups[0].record == groups[2].record
    # A store that holds nothing yet can be begun in another way.
    folder = folder.parent / "empty"
    create_dataset(folder, about())
    other = about(recipe={"rollout": {"num_inference_steps": 4}}, rewards=[])
    create_dataset(folder, other)
    append_shard(folder, 0, latents(), images(scores=[[]] * 4))
    assert open_dataset(folder).metadata == other and "reward/" not in (folder / README).read_text()


def test_latents_without_rows_are_no_shard(folder, monkeypatch):
    """Killed between the two files: the shard is made again."""
    append_shard(folder, 0, latents(), images())

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flowrl.offline.format.write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        append_shard(folder, 1, latents(), images(shard=1))
    monkeypatch.undo()
    assert latents_file(folder, 1).exists()
    assert finished_shards(folder) == [0] and len(open_dataset(folder)) == 4
    append_shard(folder, 1, latents(2), images(2, shard=1))
    assert len(open_dataset(folder)) == 6


def test_images_whose_rows_are_removed_are_not_in_the_store(folder):
    append_shard(folder, 0, latents(), images())
    lines = rows_file(folder, 0).read_text().splitlines(keepends=True)
    rows_file(folder, 0).write_text(lines[1] + lines[3])
    store = open_dataset(folder)
    assert [group.images for group in store.groups] == [(0,), (1,)]
    assert torch.equal(store.latents(torch.tensor([0, 1])), latents()[[1, 3]])


def other_rows(old: str, new: str):
    def damage(folder):
        path = rows_file(folder, 1)
        path.write_text(path.read_text().replace(old, new))

    return damage


def cut(file, count: int):
    def damage(folder):
        path = file(folder, 1)
        path.write_bytes(path.read_bytes()[:-count])

    return damage


DAMAGES = [
    cut(latents_file, 8),
    cut(rows_file, 20),
    lambda folder: latents_file(folder, 1).unlink(),
    other_rows('"row": 3', '"row": 4'),
    other_rows("reward/ocr", "ocr"),
    lambda folder: append_shard(folder, 1, torch.zeros(4, 3, 2, 3), images(shard=1)),
]


def test_a_damaged_shard_is_named_and_can_be_made_again(folder):
    for shard in range(3):
        append_shard(folder, shard, latents(), images(shard=shard))
    for damage in DAMAGES:
        damage(folder)
        with pytest.raises(UserError, match="shard 1 of .* is damaged .*000001.jsonl"):
            open_dataset(folder)
        rows_file(folder, 1).unlink()
        assert len(open_dataset(folder)) == 8
        append_shard(folder, 1, latents(), images(shard=1))
        assert len(open_dataset(folder)) == 12


def test_a_data_set_of_the_first_format_is_read_and_continued_in_it(tmp_path):
    create_dataset(tmp_path, about(format=1))
    append_shard(tmp_path, 0, latents(), images())
    create_dataset(tmp_path, about())
    append_shard(tmp_path, 1, latents(), images(shard=1))
    store = open_dataset(tmp_path)
    assert store.metadata.format == 1 and store.digests == (None,) * 8
    assert torch.equal(store.latents(torch.arange(4)), latents())
    assert "digest" not in rows_file(tmp_path, 1).read_text() + (tmp_path / README).read_text()


def test_stores_that_cannot_be_opened_or_continued_are_refused(tmp_path, folder):
    # No store an empty one and one of another format are refused.
    with pytest.raises(UserError, match="is no offline data set, it has no store.json"):
        open_dataset(tmp_path)
    with pytest.raises(UserError, match="holds no images yet"):
        open_dataset(folder)
    (folder / "store.json").write_text(about(format=7).text())
    with pytest.raises(UserError, match="cannot be read by this version .*format is 7, not 2"):
        open_dataset(folder)
    # Going on needs the same recipe.
    folder = tmp_path / "begun"
    create_dataset(folder, about())
    append_shard(folder, 0, latents(), images())
    create_dataset(folder, about())
    other = about(recipe={"rollout": {"num_inference_steps": 4}})
    with pytest.raises(
        UserError, match="with recipe.rollout.num_inference_steps = 3, and this recipe has 4"
    ):
        create_dataset(folder, other)
    with pytest.raises(UserError, match="with rewards = .*ocr"):
        create_dataset(folder, about(rewards=[]))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    with pytest.raises(UserError, match="something that is no offline data set"):
        create_dataset(tmp_path / "photos", about())


def test_a_store_whose_beginning_was_killed_can_be_begun_again(tmp_path, monkeypatch):
    calls, allowed = [], 0

    def killed(path, text):
        if len(calls) == allowed:
            (path.parent / f".{path.name}.abc.tmp").write_text(text[:9])
            raise KeyboardInterrupt
        calls.append(path.write_text(text))

    for allowed in (0, 1):
        folder = tmp_path / f"killed after {allowed}"
        folder.mkdir()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("flowrl.offline.format.write_text", killed)
            create_dataset(folder, about())
        create_dataset(folder, about())
        assert (
            DatasetMetadata.read(folder) == about()
            and "reward/ocr" in (folder / README).read_text()
        )


def test_the_card_and_the_bytes_are_a_function_of_the_store(folder, tmp_path):
    # A card that is lost is written again and one that was there is kept.
    card = (folder / README).read_bytes()
    (folder / README).unlink()
    append_shard(folder, 0, latents(), images())
    create_dataset(folder, about())
    assert (folder / README).read_bytes() == card
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / README).write_text("of someone")
    create_dataset(tmp_path / "mine", about())
    assert (tmp_path / "mine" / README).read_text() == "of someone"
    # Two stores of the same images are the same bytes.
    for name in ("a", "b"):
        create_dataset(tmp_path / name, about())
        append_shard(tmp_path / name, 0, latents(), images())
    a, b = (open_dataset(tmp_path / name) for name in ("a", "b"))
    assert a.identity == b.identity
    for path in ("store.json", README, "data/000000.jsonl", "latents/000000.safetensors"):
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
    append_shard(tmp_path / "b", 1, latents(), images(shard=1))
    assert open_dataset(tmp_path / "b").identity != a.identity

"""A data set returns what was written, bit for bit; what is damaged is named, not read."""

import math
import random
from dataclasses import replace

import pytest
import torch

from flowrl.errors import DamagedFile, UserError
from flowrl.offline.format import (
    DatasetMetadata,
    append_shard,
    create_dataset,
    open_dataset,
    shard_file,
)
from flowrl.prompts.records import PromptRecord

SHAPE = [3, 2, 2]
HOSTILE = [  # the same prompt twice
    'a "quoted" \\ star</script><b>&amp;',
    "zwei\nZeilen\r\nfür\u2028more\x85here\x00 猫 🌟",
    'a "quoted" \\ star</script><b>&amp;',
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


def latents(count=4, dtype=torch.float32):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count)).to(dtype)


def add(folder, shard, x0, *, scores=None, records=None):
    """Write a shard of groups of two."""
    scores = torch.tensor(scores or [[0.1 * i, 1.0] for i in range(len(x0))])
    records = records or [record("a star"), record("a ring")]
    number = range(len(x0))
    append_shard(
        folder, shard, x0, scores, [records[i // 2] for i in number],
        [shard * 2 + i // 2 for i in number],
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    create_dataset(tmp_path / "store", about())
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_latents_scores_and_any_prompts_come_back_bit_for_bit_in_any_order(tmp_path, name):
    dtype = getattr(torch, name)
    create_dataset(tmp_path, about(dtype=name))
    parts = [latents(4, dtype), latents(2, dtype)]
    scores = [[0.1, math.nan], [math.inf, 0.0], [-math.inf, 1 / 3], [1e-30, -2.5]]
    prompts = [
        record(text, negative=text, metadata={text: [text, {"n": None}], "count": 2})
        for text in HOSTILE
    ]
    for shard in (1, 0):  # an interrupted collection may fill a gap later
        x0, records = parts[shard], (prompts[:2], prompts[2:])[shard]
        add(tmp_path, shard, x0, scores=scores[: len(x0)], records=records)
    store, order = open_dataset(tmp_path), torch.tensor([5, 0, 3, 3, 4])
    read = store.latents(order)
    assert read.dtype == dtype and store.metadata == about(dtype=name) and len(store) == 6
    assert torch.equal(read.view(torch.uint8), torch.cat(parts)[order].view(torch.uint8))
    expected = torch.tensor(scores)
    expected[~expected.isfinite()] = math.nan  # missing is NaN, never 0
    assert torch.equal(store.scores[:4].nan_to_num(9), expected.nan_to_num(9))
    assert [group.images for group in store.groups] == [(0, 1), (2, 3), (4, 5)]
    assert [group.record for group in store.groups] == prompts
    assert len({group.key for group in store.groups}) == 3


def test_every_flipped_byte_is_named_and_a_deleted_shard_can_be_made_again(folder):
    for shard in range(2):
        add(folder, shard, latents())
    generator = random.Random(0)
    for path in (shard_file(folder, 1), folder / "store.json"):
        whole = path.read_bytes()
        for _ in range(100):
            data = bytearray(whole)
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
            with pytest.raises(DamagedFile, match=path.name):
                open_dataset(folder)
        path.write_bytes(whole[:-9])
        with pytest.raises(DamagedFile, match=path.name):
            open_dataset(folder)
        path.write_bytes(whole)
    before = shard_file(folder, 1).read_bytes()
    shard_file(folder, 1).unlink()
    assert len(open_dataset(folder)) == 4
    add(folder, 1, latents())
    assert shard_file(folder, 1).read_bytes() == before
    add(folder, 1, torch.zeros(4, 3, 2, 3))
    with pytest.raises(DamagedFile, match="000001"):
        open_dataset(folder)


def test_a_folder_that_cannot_be_opened_or_continued_is_refused(tmp_path, folder):
    with pytest.raises(UserError, match="no store.json"):
        open_dataset(tmp_path)
    with pytest.raises(UserError, match="no images yet"):
        open_dataset(folder)
    other = about(recipe={"rollout": {"num_inference_steps": 4}}, rewards=[])
    create_dataset(folder, other)  # it holds nothing yet
    assert DatasetMetadata.read(folder) == other
    create_dataset(folder, about())
    add(folder, 0, latents())
    create_dataset(folder, about())
    with pytest.raises(UserError, match="recipe.rollout.num_inference_steps = 3.* has 4"):
        create_dataset(folder, replace(other, rewards=about().rewards))
    with pytest.raises(UserError, match="with rewards = .*ocr"):
        create_dataset(folder, about(rewards=[]))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    with pytest.raises(UserError, match="something that is no offline data set"):
        create_dataset(tmp_path / "photos", about())

"""A row with anything but what was written is damaged, and never read as something else."""

import json
import math

import pytest
import torch

from flowrl.errors import UserError
from flowrl.offline.format import (
    DatasetMetadata,
    StoredImage,
    append_shard,
    create_dataset,
    open_dataset,
    rows_file,
)
from flowrl.prompts.records import PromptRecord

WRONG = [
    {"row": 1.5}, {"row": 1.0}, {"row": True}, {"row": "1"}, {"row": -1}, {"row": 0}, {"row": 2},
    {"group": 0.5}, {"group": "0"}, {"group": None}, {"prompt": 7}, {"prompt": None}, {"uid": 7},
    {"negative": 7}, {"metadata": "[1]"}, {"metadata": "{"}, {"metadata": {}},
    {"reward/ocr": "1"}, {"reward/ocr": True}, {"reward/ocr": math.nan}, {"reward/ocr": [1]},
]  # fmt: skip


@pytest.fixture
def rows(tmp_path):
    """The file with the rows of a group of two."""
    create_dataset(
        tmp_path,
        DatasetMetadata(
            pipeline="models/one",
            backbone="sd3",
            latent_shape=[2],
            dtype="float32",
            sigmas=[1.0, 0.0],
            rewards=[{"name": "ocr", "version": None, "weight": 1.0}],
            recipe={},
            format=1,  # without digests, which would find all of this first
        ),
    )
    record = PromptRecord(uid="a", text="a star", metadata={"tag": "colors"})
    images = [
        StoredImage(
            record=record, group=0, image=i, valid=True, scores=[1.0], seed=0, iteration=0, root=i
        )
        for i in range(2)
    ]
    append_shard(tmp_path, 0, torch.zeros(2, 2), images)
    return rows_file(tmp_path, 0)


def change(rows, **values):
    """Other values in the second row."""
    first, second = rows.read_text().splitlines()
    rows.write_text(first + "\n" + json.dumps(json.loads(second) | values))


def test_a_wrong_value_or_line_is_damage(rows):
    whole = rows.read_text()
    for values in WRONG:
        rows.write_text(whole)
        change(rows, **values)
        with pytest.raises(UserError, match="shard 0 of .* is damaged .*row.*000000.jsonl"):
            open_dataset(rows.parents[1])
    for line in ("[1]", "3", "null", '"row"', "{"):
        rows.write_text(whole + line)
        with pytest.raises(UserError, match="shard 0 of .* is damaged .*row"):
            open_dataset(rows.parents[1])


def test_what_is_not_read_may_be_anything_and_a_score_a_whole_number(rows):
    change(rows, **{"seed": None, "annotator": [1], "reward/ocr": 1})
    assert open_dataset(rows.parents[1]).scores.tolist() == [[1.0], [1.0]]

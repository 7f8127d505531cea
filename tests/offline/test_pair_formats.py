"""Pairs in everybody's formats, written by hand after their documentation, with broken twins."""

import io
import json
from datetime import datetime

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.offline.pairs import encoded, exists, read_pairs


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


GOOD, BAD = png(255), png(0)


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def images(tmp_path):
    (tmp_path / "good.png").write_bytes(GOOD)
    (tmp_path / "bad.png").write_bytes(BAD)
    return tmp_path


def parquet(path, columns: dict):
    pa = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path, row_group_size=2)
    return path


def only(source):
    """The prompt, metadata and images of the one pair of a source."""
    (pair,), left_out = read_pairs(source)
    return pair, encoded(pair.chosen), encoded(pair.rejected), left_out


def test_pick_a_pic_has_images_in_its_table_and_ties_are_left_out(tmp_path, caplog):
    texts = ["image_0_uid", "image_0_url", "image_1_uid", "image_1_url", "model_0", "model_1"]
    columns = {
        **{name: ["x"] * 4 for name in texts},
        "are_different": [True] * 4,
        "user_id": [3] * 4,
        "num_example_per_prompt": [1] * 4,
        "__index_level_0__": [0, 1, 2, 3],
        "caption": ["a cat", "a dog", "a cow", "a hen"],
        "jpg_0": [BAD, GOOD, GOOD, GOOD],
        "jpg_1": [GOOD, BAD, BAD, BAD],
        "label_0": [0.0, 1.0, 0.5, 1.0],
        "label_1": [1.0, 0.0, 0.5, 0.0],
        "has_label": [True, True, True, False],
        "ranking_id": [7, 8, 9, 10],
        "created_at": [datetime(2022, 11, 12, 13, 14)] * 4,
        "best_image_uid": ["u", None, "u", "u"],
    }
    parquet(tmp_path / "data" / "train-0.parquet", columns)
    pairs, left_out = read_pairs(tmp_path)
    assert [pair.record.text for pair in pairs] == ["a cat", "a dog"]
    assert all(encoded(p.chosen) == GOOD and encoded(p.rejected) == BAD for p in pairs)
    first, second = (pair.record.metadata for pair in pairs)
    assert (first["ranking_id"], first["best_image_uid"], first["model_0"]) == (7, "u", "x")
    assert second["ranking_id"] == 8 and "best_image_uid" not in second
    assert set(first).isdisjoint({"created_at", "jpg_0", "jpg_1", "label_0", "label_1", "caption"})
    assert "row 3: label_0 is 0.5, a tie" in left_out[0] and "has_label is false" in left_out[1]
    parquet(tmp_path / "data" / "test_unique-0.parquet", columns)
    assert len(read_pairs(tmp_path)[0]) == 4
    assert "has the parts test_unique, train: all are read" in caplog.text
    for name in ("train-0", "test_unique-0", "b"):
        (tmp_path / "data" / f"{name}.parquet").unlink(missing_ok=True)
    ties = {key: values[2:] for key, values in columns.items()}
    parquet(tmp_path / "data" / "b.parquet", ties)
    with pytest.raises(UserError, match="holds no decided pair; .*row 1: label_0 is 0.5, a tie"):
        read_pairs(tmp_path)


def test_a_row_with_an_empty_field_is_left_out_and_the_others_are_read(tmp_path):
    columns = {
        "caption": ["a cat", None, "a cow"], "jpg_0": [GOOD] * 3, "jpg_1": [BAD] * 3,
        "label_0": [None, 1.0, 1.0],
    }  # fmt: skip
    pairs, left_out = read_pairs(parquet(tmp_path / "a.parquet", columns))
    assert [pair.record.text for pair in pairs] == ["a cow"]
    assert "row 1: label_0 is empty" in left_out[0] and "row 2: caption is empty" in left_out[1]


def test_open_image_preferences_has_images_as_structures(tmp_path):
    image = lambda data: {"bytes": data, "path": None}  # noqa: E731
    columns = {"prompt": ["a cat"], "chosen": [image(GOOD)], "rejected": [image(BAD)]}
    pair, chosen, rejected, _ = only(parquet(tmp_path / "a.parquet", columns))
    assert (pair.record.text, chosen, rejected) == ("a cat", GOOD, BAD)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not whole")
    with pytest.raises(UserError, match="is not a parquet file, or not whole"):
        read_pairs(tmp_path / "a.parquet")


def test_hpdv3_prefers_path1(images):
    row = {"prompt": "a cat", "path1": "good.png", "path2": "bad.png", "confidence": 0.9}
    (images / "hpd.json").write_text(json.dumps([row]))
    pair, chosen, rejected, _ = only(images / "hpd.json")
    assert (chosen, rejected, pair.record.metadata) == (GOOD, BAD, {"confidence": 0.9})
    (images / "hpd.json").write_text(json.dumps([row | {"path2": None}]))
    with pytest.raises(UserError, match='entry 1: expected the paths of images "path2"'):
        read_pairs(images / "hpd.json")
    (images / "hpd.json").write_text(json.dumps(row))
    with pytest.raises(UserError, match="expected a list of objects"):
        read_pairs(images / "hpd.json")


def test_flow_factorys_second_version(images):
    media = lambda path: {"media": [{"type": "image", "path": path}]}  # noqa: E731
    row = {
        "schema_version": 2,
        "input": {"prompt": "a cat", "negative_prompt": "blurry"},
        "supervision": {"chosen": media("good.png"), "rejected": media("bad.png")},
    }
    pair, chosen, rejected, _ = only(jsonl(images / "a.jsonl", row))
    assert (chosen, rejected, pair.record.negative) == (GOOD, BAD, "blurry")
    with pytest.raises(UserError, match="line 1: .* schema_version is 3, expected 2"):
        read_pairs(jsonl(images / "a.jsonl", row | {"schema_version": 3}))
    broken = row | {"supervision": {"chosen": media("good.png")}}
    with pytest.raises(UserError, match="line 1: .* lacks 'rejected'"):
        read_pairs(jsonl(images / "a.jsonl", broken))
    two = {"media": media("good.png")["media"] * 2}
    broken = row | {"supervision": {"chosen": two, "rejected": media("bad.png")}}
    with pytest.raises(UserError, match="has 2 media in supervision.chosen, expected one image"):
        read_pairs(jsonl(images / "a.jsonl", broken))
    broken = row | {"supervision": {"chosen": media(""), "rejected": media("bad.png")}}
    with pytest.raises(UserError, match=r'of images "supervision\.chosen\.media\[0\]\.path"'):
        read_pairs(jsonl(images / "a.jsonl", broken))


def test_verl_omni_has_scores(images):
    row = {"prompt": "a cat", "img_win": "good.png", "img_lose": "bad.png"}
    row |= {"win_score": 0.9, "lose_score": 0.1}
    pair, chosen, rejected, _ = only(jsonl(images / "a.jsonl", row))
    assert (chosen, rejected, pair.record.metadata["win_score"]) == (GOOD, BAD, 0.9)
    equal = jsonl(images / "a.jsonl", row, row | {"win_score": 0.1})
    assert "line 2: win_score 0.1 is not above lose_score 0.1" in read_pairs(equal)[1][0]
    with pytest.raises(UserError, match='line 1: expected the paths of images "img_lose"'):
        read_pairs(jsonl(images / "a.jsonl", row | {"img_lose": 3}))


def test_twin_folders_pair_images_of_one_name(tmp_path):
    for name, data in (("chosen", GOOD), ("rejected", BAD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(data)
    with pytest.raises(UserError, match=r"1.png: expected its prompt in .*1.txt"):
        read_pairs(tmp_path)
    (tmp_path / "chosen" / "1.txt").write_text("a cat\n")
    pair, chosen, rejected, _ = only(tmp_path)
    assert (pair.record.text, chosen, rejected) == ("a cat", GOOD, BAD)
    for alone in ("chosen/0.png", "rejected/3.png"):
        (tmp_path / alone).write_bytes(GOOD)
    (pair,), left_out = read_pairs(tmp_path)
    assert pair.record.text == "a cat"
    assert [line.partition(":")[0] for line in left_out] == [
        str(tmp_path / "chosen/0.png"), str(tmp_path / "rejected/3.png"),
    ]  # fmt: skip
    (tmp_path / "rejected" / "1.png").rename(tmp_path / "rejected" / "2.png")
    with pytest.raises(UserError, match="there is no image of its name in .*rejected"):
        read_pairs(tmp_path)
    (tmp_path / "rejected").rename(tmp_path / "other")
    with pytest.raises(UserError, match="none of the folders chosen and rejected, win and lose"):
        read_pairs(tmp_path)


def test_rows_of_no_known_format_name_the_known_ones(images):
    with pytest.raises(UserError, match="line 1: has a, b, expected one of: schema_version, input"):
        read_pairs(jsonl(images / "a.jsonl", {"a": 1, "b": 2}))
    missing = jsonl(images / "a.jsonl", {"prompt": "x", "chosen": "no.png", "rejected": "bad.png"})
    (pair,), _ = read_pairs(missing)
    assert not exists(pair.chosen) and exists(pair.rejected)

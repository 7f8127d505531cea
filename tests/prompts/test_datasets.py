import json

import datasets
import pytest
from datasets import config

from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts
from flowrl.tiny.world import split_prompts

ROWS = [
    {"prompt": "two cats", "tag": "counting", "include": [{"class": "cat", "count": 2}]},
    {"prompt": "a red cup", "tag": "colors", "include": [{"class": "cup", "color": "red"}]},
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """Neither progress bars nor files in the user's cache."""
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def table(rows=ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def as_jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(path)


def test_parquet_files_and_folders_give_the_prompts_of_the_same_jsonl(tmp_path):
    expected = as_jsonl(tmp_path / "rows.jsonl", ROWS)
    table().to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "many").mkdir()
    for i in range(len(ROWS)):
        # Every file with the columns of all, as one table has them.
        table(ROWS).select([i]).to_parquet(tmp_path / "many" / f"part-{i}.parquet")
    for name in ("rows.parquet", "many"):
        assert load_prompts(tmp_path / name) == expected, name
    assert load_prompts(f"hf:{tmp_path}/many") == expected
    assert load_prompts(tmp_path / "rows.parquet", limit=1) == expected[:1]


def test_a_split_and_a_column_are_named_after_the_place(tmp_path):
    path = tmp_path / "a.parquet"
    table([{"words": "a cat", "caption": "b", "n": 1}]).to_parquet(path)
    (record,) = load_prompts(f"hf:{path}:train:words")
    assert (record.text, record.metadata) == ("a cat", {"caption": "b", "n": 1})
    assert load_prompts(f"hf:{path}:train")[0].text == "b"
    # Files of one split are read alone when their names say so.
    (tmp_path / "p").mkdir()
    for split in ("train", "test"):
        table([{"prompt": split}]).to_parquet(tmp_path / f"p/{split}-00000-of-00001.parquet")
    assert [p.text for p in load_prompts(f"hf:{tmp_path}/p:test")] == ["test"]
    assert [p.text for p in load_prompts(tmp_path / "p")] == ["train"]
    with pytest.raises(UserError, match="split 'dev': .*[tT]rain.*test"):
        load_prompts(f"hf:{tmp_path}/p:dev")


def test_lists_of_several_types_are_read_from_data_sets_of_json_lines(tmp_path):
    place = {"class": "cat", "count": 1, "position": ["right of", 0]}
    rows = [{"prompt": "a cat right of a dog", "include": [{"class": "dog", "count": 1}, place]}]
    rows += [{"prompt": "a red cup", "include": [{"class": "cup", "color": "red"}]}]
    (tmp_path / "set").mkdir()
    expected = as_jsonl(tmp_path / "set" / "rows.jsonl", rows)
    assert load_prompts(tmp_path / "set") == expected
    assert expected[0].metadata["include"][1] == place


def test_text_of_columns_is_read_as_json_only_where_it_is(tmp_path):
    # Metadata written as json text is what it says.
    prompts = list(split_prompts("position", "train"))[:5]
    rows = [{"prompt": p["prompt"], "metadata": json.dumps(p)} for p in prompts]
    table(rows).to_parquet(tmp_path / "p.parquet")
    expected = as_jsonl(tmp_path / "rows.jsonl", prompts)
    assert load_prompts(tmp_path / "p.parquet") == expected
    # Text that only looks like json stays text.
    rows = [{"prompt": "a", "ocr_text": text} for text in ("[SALE]", "[1]", "{}}", "{ 5")]
    table(rows).to_parquet(tmp_path / "p.parquet")
    prompts = load_prompts(tmp_path / "p.parquet")
    assert [p.metadata["ocr_text"] for p in prompts] == [row["ocr_text"] for row in rows]


def test_images_are_not_read_and_bad_columns_are_refused(tmp_path):
    # Images and bytes are not read and what is empty is left out.
    rows = [{"prompt": "a", "raw": b"x", "n": None, "image": {"bytes": b"no image", "path": "p"}}]
    kinds = {"prompt": "string", "raw": "binary", "n": "int64"}
    columns = {name: datasets.Value(kind) for name, kind in kinds.items()}
    features = datasets.Features(columns | {"image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet")[0].metadata == {}
    # Other columns and an empty text are sentences.
    table([{"words": "a"}]).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(UserError, match="no column of texts.* among words"):
        load_prompts(tmp_path / "p.parquet")
    table([{"prompt": "a"}, {"prompt": None}]).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(UserError, match="gap.parquet, row 2: expected .* a text"):
        load_prompts(tmp_path / "gap.parquet")

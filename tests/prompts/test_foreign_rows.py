"""Prompts of other projects, written after their documentation, each with a broken twin."""

import json

import pytest

from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_data_folder_gives_the_file_of_each_split(tmp_path):
    folder = tmp_path / "dataset" / "geneval"
    row = {"tag": "colors", "include": [{"class": "cat", "count": 1}], "prompt": "a cat"}
    write(folder / "train_metadata.jsonl", row, row | {"prompt": "a dog"})
    write(folder / "test_metadata.jsonl", row)
    assert len(load_prompts(folder)) == 2
    (record,) = load_prompts(folder, split="test")
    assert record.text == "a cat" and record.metadata["tag"] == "colors"
    (tmp_path / "ocr").mkdir()
    (tmp_path / "ocr" / "train.txt").write_text('a sign "X"\n')
    assert load_prompts(tmp_path / "ocr")[0].text == 'a sign "X"'
    with pytest.raises(UserError, match="it has train.txt, and no test_metadata.jsonl, test.jsonl"):
        load_prompts(tmp_path / "ocr", split="test")


def test_of_several_files_of_a_split_the_one_with_metadata_is_read(tmp_path):
    write(tmp_path / "train_metadata.jsonl", {"prompt": "with metadata"})
    write(tmp_path / "train.jsonl", {"prompt": "rows"})
    (tmp_path / "train.txt").write_text("lines\n")
    assert load_prompts(tmp_path)[0].text == "with metadata"
    (tmp_path / "train_metadata.jsonl").unlink()
    assert load_prompts(tmp_path)[0].text == "rows"


def test_a_unicode_line_separator_inside_a_json_text_ends_no_row(tmp_path):
    row = {"prompt": "a\u2028b"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", "utf-8")
    (record,) = load_prompts(tmp_path / "a.jsonl")
    assert record.text == "a\u2028b"


def test_an_empty_negative_prompt_beside_a_negative_is_no_conflict(tmp_path):
    row = {"prompt": "a cat", "negative": "blurry", "negative_prompt": None}
    (record,) = load_prompts(write(tmp_path / "a.jsonl", row))
    assert record.negative == "blurry"


def test_negative_prompt_is_the_negative_prompt(tmp_path):
    source = write(tmp_path / "a.jsonl", {"prompt": "a cat", "negative_prompt": "blurry"})
    (record,) = load_prompts(source)
    assert record.negative == "blurry" and record.metadata == {}
    row = {"prompt": "a cat", "negative_prompt": "blurry", "negative": "dark"}
    with pytest.raises(UserError, match='line 1: "negative" and "negative_prompt" differ'):
        load_prompts(write(tmp_path / "a.jsonl", row))
    with pytest.raises(UserError, match='line 1: "negative" must be a text'):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "a", "negative_prompt": 3}))


def test_metadata_written_as_json_become_metadata(tmp_path):
    inner = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}
    source = write(tmp_path / "a.jsonl", {"prompt": "two cats", "metadata": json.dumps(inner)})
    (record,) = load_prompts(source)
    assert record.metadata == inner
    row = {"prompt": "two cats", "metadata": inner | {"negative_prompt": "blurry"}}
    (record,) = load_prompts(write(tmp_path / "a.jsonl", row))
    assert record.metadata == inner and record.negative == "blurry"
    with pytest.raises(UserError, match='line 1: "metadata" is not valid JSON'):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "a", "metadata": "{tag"}))
    with pytest.raises(UserError, match='line 1: "metadata" must hold an object'):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "a", "metadata": "[1]"}))


VERL = {
    "data_source": "flow_grpo/ocr",
    "prompt": [
        {"role": "system", "content": "draw"},
        {"role": "user", "content": 'a sign "HI"'},
    ],
    "reward_model": {"style": "rule", "ground_truth": "HI"},
    "extra_info": {"index": 3},
}


def test_of_verls_chats_the_last_user_message_is_the_prompt(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([VERL]).to_parquet(str(path))
    for source in (path, write(tmp_path / "a.jsonl", VERL)):
        (record,) = load_prompts(source)
        assert record.text == 'a sign "HI"'
        assert record.metadata["ground_truth"] == record.metadata["ocr_text"] == "HI"
    heard = {"role": "user", "content": 'a sign "HO"'}
    datasets.Dataset.from_list([VERL | {"prompt": [heard]}]).to_parquet(
        str(tmp_path / "test.parquet")
    )
    found = {split: load_prompts(tmp_path, split=split) for split in ("train", "test")}
    assert [record.text for record in found["test"]] == ['a sign "HO"']
    assert [record.text for record in found["train"]] == ['a sign "HI"']
    broken = VERL | {"prompt": [{"role": "system", "content": "draw"}]}
    with pytest.raises(UserError, match='line 1: "prompt" is a list, expected messages'):
        load_prompts(write(tmp_path / "a.jsonl", broken))

import json
import sys

import datasets
import pytest
from datasets import config, exceptions

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


def test_saved_folders_and_parquet_files_give_the_prompts_of_the_same_jsonl(tmp_path):
    expected = as_jsonl(tmp_path / "rows.jsonl", ROWS)
    table().save_to_disk(tmp_path / "saved")
    table().to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "many").mkdir()
    for i, row in enumerate(ROWS):
        # Every file with the columns of all, as one table has them.
        table(ROWS).select([i]).to_parquet(tmp_path / "many" / f"part-{i}.parquet")
        assert row["prompt"] == expected[i].text
    for name in ("saved", "rows.parquet", "many"):
        assert load_prompts(tmp_path / name) == expected, name
    assert load_prompts(f"hf:{tmp_path}/saved") == expected
    assert load_prompts(tmp_path / "rows.parquet", limit=1) == expected[:1]


def test_a_split_and_a_column_are_named_after_the_place(tmp_path):
    rows = [{"words": "a cat", "caption": "b", "n": 1}]
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": table(), "test": table(rows)}).save_to_disk(folder)
    (found,) = load_prompts(f"hf:{folder}:test:words")
    assert (found.text, found.metadata) == ("a cat", {"caption": "b", "n": 1})
    assert load_prompts(f"hf:{folder}:test")[0].text == "b"
    assert [p.text for p in load_prompts(folder)] == ["two cats", "a red cup"]


@pytest.mark.parametrize("column", ["prompt", "text", "caption"])
def test_the_usual_columns_are_recognised(tmp_path, column):
    table([{column: "a cat", "other": "b"}]).to_parquet(tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet")[0].text == "a cat"


def test_files_of_one_split_are_read_alone_when_their_names_say_so(tmp_path):
    for split in ("train", "test"):
        table([{"prompt": split}]).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    assert [p.text for p in load_prompts(f"hf:{tmp_path}:test")] == ["test"]
    assert [p.text for p in load_prompts(tmp_path)] == ["train"]
    with pytest.raises(UserError, match="have the splits test, train, not 'dev'"):
        load_prompts(f"hf:{tmp_path}:dev")


def test_metadata_written_as_json_text_is_what_it_says(tmp_path):
    prompts = list(split_prompts("position", "train"))[:5]
    rows = [{"prompt": p["prompt"], "metadata": json.dumps(p)} for p in prompts]
    table(rows).to_parquet(tmp_path / "p.parquet")
    expected = as_jsonl(tmp_path / "rows.jsonl", prompts)
    assert load_prompts(tmp_path / "p.parquet") == expected


def test_text_that_only_looks_like_json_stays_text(tmp_path):
    rows = [{"prompt": "a", "ocr_text": text} for text in ("[SALE]", "[1]", "{}}", "{ 5")]
    table(rows).to_parquet(tmp_path / "p.parquet")
    found = load_prompts(tmp_path / "p.parquet")
    assert [p.metadata["ocr_text"] for p in found] == [row["ocr_text"] for row in rows]


def test_pictures_and_bytes_are_not_read_and_what_is_empty_is_left_out(tmp_path):
    rows = [{"prompt": "a", "raw": b"x", "n": None, "image": {"bytes": b"no picture", "path": "p"}}]
    kinds = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "raw": datasets.Value("binary"),
            "n": datasets.Value("int64"),
            "image": datasets.Image(),
        }
    )
    datasets.Dataset.from_list(rows, features=kinds).save_to_disk(tmp_path / "saved")
    assert load_prompts(tmp_path / "saved")[0].metadata == {}


def test_other_columns_another_split_and_an_empty_text_are_sentences(tmp_path):
    table([{"words": "a"}]).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(UserError, match="have the columns words; expected one of prompt, text"):
        load_prompts(tmp_path / "p.parquet")
    datasets.DatasetDict({"train": table()}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="have the splits train, not 'dev'"):
        load_prompts(f"hf:{tmp_path}/saved:dev")
    table([{"prompt": "a"}, {"prompt": None}]).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(UserError, match="gap.parquet, row 2: expected .* a text"):
        load_prompts(tmp_path / "gap.parquet")


def test_a_saved_table_without_splits_is_the_training_one_and_no_other(tmp_path):
    table().save_to_disk(tmp_path / "saved")
    assert load_prompts(f"hf:{tmp_path}/saved:train") == load_prompts(tmp_path / "saved")
    for split in ("test", "test[:1]"):
        with pytest.raises(UserError, match="have the splits train, not 'test'"):
            load_prompts(f"hf:{tmp_path}/saved:{split}")


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("[:2]", "ab"),
        ("[1:3]", "bc"),
        ("[3:]", "d"),
        ("[:50%]", "ab"),
        ("[-1:]", "d"),
        ("", "abcd"),
    ],
)
@pytest.mark.parametrize("form", ["saved", "dict", "rows.parquet"])
def test_a_split_may_be_cut(tmp_path, form, cut, expected):
    rows = table([{"words": letter, "n": 1} for letter in "abcd"])
    if form == "saved":
        rows.save_to_disk(tmp_path / form)
    elif form == "dict":
        datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / form)
    else:
        rows.to_parquet(tmp_path / form)
    found = load_prompts(f"hf:{tmp_path / form}:train{cut}:words")
    assert "".join(p.text for p in found) == expected


def test_a_split_of_the_hub_arrives_as_it_was_written(monkeypatch):
    asked = []

    def load(name, split):
        asked.append((name, split))
        return table()

    monkeypatch.setattr(datasets, "load_dataset", load)
    load_prompts("hf:someone/prompts:train[:100]")
    load_prompts("hf:someone/prompts:train[10%:]+test[:5]:prompt")
    load_prompts("hf:someone/prompts")
    assert [split for _, split in asked] == ["train[:100]", "train[10%:]+test[:5]", "train"]
    assert {name for name, _ in asked} == {"someone/prompts"}


def test_a_cut_that_cannot_be_read_is_a_sentence(tmp_path):
    table().save_to_disk(tmp_path / "saved")
    for cut in ("[:x]", "[", "[:1][:2]"):
        with pytest.raises(UserError, match="cannot read prompts"):
            load_prompts(f"hf:{tmp_path}/saved:train{cut}")


def test_a_file_that_is_damaged_in_its_middle_is_a_sentence(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": f"{n} cats {n * 'x'}"} for n in range(2000)]
    table(rows).to_parquet(path, batch_size=100)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3 : len(whole) // 2] = bytes(len(whole) // 2 - len(whole) // 3)
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"cannot read prompts .*rows.parquet.*after row \d+"):
        load_prompts(path)


@pytest.mark.parametrize("name", ["hf:", "hf::train", "hf: :train:prompt"])
def test_no_name_is_refused_and_not_the_working_directory(name, tmp_path, monkeypatch):
    table().to_parquet(tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hf:NAME"):
        load_prompts(name)


def test_a_folder_or_file_that_is_no_table_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no .parquet or .arrow file"):
        load_prompts(tmp_path)
    with pytest.raises(UserError, match="no such file or folder"):
        load_prompts(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(UserError, match="cannot read prompts .*bad.parquet"):
        load_prompts(tmp_path / "bad.parquet")


def test_a_data_set_of_the_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="someone/prompts.*hub cannot be reached: load it once"):
        load_prompts("hf:someone/prompts")


def test_a_gated_data_set_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise exceptions.DatasetNotFoundError("Dataset 'x/y' is a gated dataset.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match="accept its terms on its page"):
        load_prompts("hf:x/y")


def test_without_the_package_only_data_sets_are_out_of_reach(monkeypatch, tmp_path):
    (tmp_path / "p.txt").write_text("a cat")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_prompts(tmp_path / "p.txt")[0].text == "a cat"
    with pytest.raises(UserError, match="pip install datasets"):
        load_prompts("hf:x/y")

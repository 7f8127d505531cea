"""Prompt files and data sets: text, tables, folders, and rows as other projects write them."""

import json

import datasets
import pytest
from datasets import config

from flowrl.assembly.learner import build_prompts
from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts
from flowrl.tiny.world import split_prompts

FILES = {
    "a.txt": "\ufeffA red car\n\n  A cat \n",
    "drawbench.csv": 'Prompts,Category\n"A red, old car",Colors\nA cat,\n',
    "parti.TSV": 'Prompt\tCategory\n"A red, old car\tAbstract\nA cat\tAbstract\n',
    "oneig.csv": "category,id,prompt_en\nText,001,A red car\nText,002,A cat\n",
    "anime.json": '["A red car", "A cat"]',
    "hpdv3.json": '[{"prompt": "A red car", "path1": "a"}, {"prompt": "A cat"}]',
    "genai.json": '{"00000": {"id": "0", "prompt": "A red car"}, "00001": {"prompt": "A cat"}}',
    "captions.JSONL": '{"caption": "A red car", "n": 2}\n{"caption": "A cat"}\r\n',
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_published_benchmarks_are_read(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    first, second = load_prompts(path)
    assert "car" in first.text and second.text == "A cat"
    assert load_prompts(path, limit=1) == [first]
    if name == "drawbench.csv":
        assert first.text == "A red, old car" and first.metadata == {"Category": "Colors"}
        assert second.metadata == {}


def test_a_column_is_chosen_by_name_and_an_ambiguous_or_missing_one_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("short,long\na cat,a cat that sleeps\n")
    assert load_prompts(f"{path}:long")[0].text == "a cat that sleeps"
    for source in (path, f"{path}:none"):
        with pytest.raises(UserError, match="short, long"):
            load_prompts(source)
    path.write_text("Prompt,PROMPT\na,b\n")
    with pytest.raises(UserError, match="Prompt, PROMPT"):
        load_prompts(path)
    for header in ("prompt,prompt", "Prompt,prompt"):
        path.write_text(f"{header}\na,b\n")
        with pytest.raises(UserError, match=header.replace(",", ", ")):
            load_prompts(path)
    path.write_text('prompt,include\ntwo cats,"[{""class"": ""cat"", ""count"": 2}]"\n')
    assert load_prompts(path)[0].metadata["include"] == [{"class": "cat", "count": 2}]
    path.write_text("prompt,kind\n,x\n")
    with pytest.raises(UserError, match='line 2.*"prompt"'):
        load_prompts(path)
    path.write_text("prompt\na cat, a dog\n")
    with pytest.raises(UserError, match="line 2: .*2 cells, expected 1"):
        load_prompts(path)


# --- rows ----------------------------------------------------------------------------------------

COUNTING = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}
ROWS = [  # a row; its text, negative prompt and metadata
    (COUNTING | {"prompt": "two cats"}, "two cats", None, COUNTING),
    ({"text": "x", "negative": "blur"}, "x", "blur", {}),
    ({"prompt": "x", "negative_prompt": "blur"}, "x", "blur", {}),
    ({"prompt": "x", "negative": "blur", "negative_prompt": None}, "x", "blur", {}),
    ({"prompt": "x", "metadata": json.dumps(COUNTING)}, "x", None, COUNTING),
    ({"prompt": "x", "metadata": COUNTING | {"negative_prompt": "b"}}, "x", "b", COUNTING),
    ({"prompt": "x", "metadata": COUNTING | {"prompt": "y"}}, "x", None, COUNTING),
    ({"prompt": "a\u2028b"}, "a\u2028b", None, {}),  # this line separator ends no row
]


@pytest.mark.parametrize(("row", "text", "negative", "metadata"), ROWS)
def test_a_row_is_text_negative_prompt_and_metadata(row, text, negative, metadata, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
    (record,) = load_prompts(tmp_path / "a.jsonl")
    assert (record.text, record.negative, record.metadata) == (text, negative, metadata)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": ', "JSON"), ("[" * 100_000, "JSON"), ("[1]", "object"),
        ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "JSON"), ('{"title": "a"}', "title"),
        ('{"prompt": " "}', '"prompt"'), ('{"prompt": "a", "negative": 3}', '"negative"'),
        ('{"prompt": "a", "metadata": "{tag"}', '"metadata"'),
        ('{"prompt": "a", "metadata": "[1]"}', '"metadata"'),
        ('{"prompt": "a \\ud800 cat"}', "hex escape"),
        ('{"prompt": "a", "negative": "\\udfff"}', "surrogate"),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_malformed_row_is_refused_with_its_line(row, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat"}\n' + row)
    with pytest.raises(UserError, match=f"(?s)line 2:? .*{message}"):
        load_prompts(path)


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    for name, content in (("p.txt", "\n\n"), ("p.csv", "prompt"), ("p.xls", "a")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=name):
            load_prompts(tmp_path / name)
    for source in ("none.txt", "tiny:geneval", "tiny:cats:train", "tiny:ocr:test:x"):
        with pytest.raises(UserError, match="cannot read prompts"):
            load_prompts(source)
    with pytest.raises(UserError, match="prompt 1"):
        build_prompts("", ["a cat", " "])


# --- data sets -----------------------------------------------------------------------------------


TABLE = [
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


def table(rows=TABLE) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def as_jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(path)


def test_parquet_files_and_folders_give_the_prompts_of_the_same_jsonl(tmp_path):
    expected = as_jsonl(tmp_path / "rows.jsonl", TABLE)
    table().to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "many").mkdir()
    for i in range(len(TABLE)):
        # Every file with the columns of all, as one table has them.
        table(TABLE).select([i]).to_parquet(tmp_path / "many" / f"part-{i}.parquet")
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

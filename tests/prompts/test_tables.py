"""Prompt files as the published benchmarks have them."""

import pytest

from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts

FILES = {
    "drawbench.csv": 'Prompts,Category\n"A red, old car",Colors\nA cat,\n',
    "parti.TSV": 'Prompt\tCategory\n"A red, old car\tAbstract\nA cat\tAbstract\n',
    "oneig.csv": "category,id,prompt_en\nText,001,A red car\nText,002,A cat\n",
    "anime.json": '["A red car", "A cat"]',
    "hpdv3.json": '[{"prompt": "A red car", "path1": "a"}, {"prompt": "A cat"}]',
    "genai.json": '{"00000": {"id": "0", "prompt": "A red car"}, "00001": {"prompt": "A cat"}}',
    "captions.JSONL": '{"caption": "A red car", "n": 2}\n{"caption": "A cat"}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_published_benchmarks_are_read(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name])
    first, second = load_prompts(path)
    assert "car" in first.text and second.text == "A cat"
    if name == "drawbench.csv":
        assert first.text == "A red, old car" and first.metadata == {"Category": "Colors"}
        assert second.metadata == {}
    if name == "parti.TSV":
        assert first.text == '"A red, old car'


def test_a_column_is_chosen_by_name_and_an_ambiguous_or_missing_one_is_said(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("short,long\na cat,a cat that sleeps\n")
    assert load_prompts(f"{path}:long")[0].text == "a cat that sleeps"
    for source in (path, f"{path}:none"):
        with pytest.raises(UserError, match="short, long"):
            load_prompts(source)
    path.write_text("Prompt,PROMPT\na,b\n")
    with pytest.raises(UserError, match="Prompt, PROMPT"):
        load_prompts(path)
    path.write_text("prompt\na cat, a dog\n")
    with pytest.raises(UserError, match="row 1"):
        load_prompts(path)

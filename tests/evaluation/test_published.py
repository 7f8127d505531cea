"""Prompt files as their authors publish them, a few rows each, and broken twins."""

import json
import re
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import UserError
from flowrl.evaluation.benchmark import benchmark_prompts
from flowrl.evaluation.published import PUBLISHED
from flowrl.scoring.spec import load_reward

DPG = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
WISE = {"Explanation": "mooncakes", "Category": "Cultural knowledge", "Subcategory": "Festival"}
GRAPH = {"question": '{"1": "Is there a boy?", "2": "Is he old?"}',
         "dependency": '{"1": [0], "2": [1]}'}  # fmt: skip
SPECIMENS = {  # name: the files, then text, kind and metadata of the last prompt
    "geneval2": (
        {"geneval2_data.jsonl": json.dumps(
            {"prompt": "two metal toys", "atom_count": 3, "skills": ["count"],
             "vqa_list": [["How many toys are in the image?", "two"]]}) + "\n"},
        "two metal toys", "03", {"vqa_list": [["How many toys are in the image?", "two"]]},
    ),
    "dpg": (
        {"dpg_bench.csv": f"""{DPG}question_natural_language
0,"Apples, ripe.",,1,0,entity,whole,entity - whole (apples),Are there apples?
0,"Apples, ripe.",,2,1,attribute,state,"attribute - state (apples, ripe)",Are the apples ripe?
7,A cat on a mat.,,1,0,entity,whole,entity - whole (cat),Is there a cat?
7,A cat on a mat.,,2,0,entity,whole,entity - whole (mat),Is there a mat?
7,A cat on a mat.,,3,"1, 2",relation,spatial,"relation - spatial (cat, mat, on)",Is it on it?
"""},
        "A cat on a mat.", "", {"item_id": "7", "question_graph": [
            ("Is there a cat?", []), ("Is there a mat?", []), ("Is it on it?", [0, 1])]},
    ),
    "oneig": (
        {"OneIG-Bench.csv": 'category,id,prompt_en,type,prompt_length,class\n'
         'Text_Rendering,000,A sign,NP,short,\nPortrait,001,"a boy, old","T, P",long,\n',
         "scripts/alignment/Q_D/human.json": json.dumps({"001": GRAPH})},
        "a boy, old", "Portrait",
        {"question_graph": [("Is there a boy?", []), ("Is he old?", [0])]},
    ),
    "t2i_compbench": (
        {name: "a green bench and a blue bowl\r\ntwo boys"
         for name in PUBLISHED["t2i_compbench"].files},
        "two boys", "complex", {},
    ),
    "wise": (
        {name: json.dumps([{"Prompt": "A pastry", "prompt_id": 1} | WISE], indent=2)
         for name in PUBLISHED["wise"].files},
        "A pastry", "Cultural knowledge", {"Explanation": "mooncakes"},
    ),
    "drawbench": (
        {"drawbench.csv": "Prompts,Category\nA red colored car.,Colors"},
        "A red colored car.", "Colors", {},
    ),
    "partiprompts": (
        {"PartiPrompts.tsv": 'Prompt\tCategory\tChallenge\tNote\n"G I G" on a wall\tArts\tBasic\t\n'},
        '"G I G" on a wall', "Arts", {"Challenge": "Basic"},
    ),
}  # fmt: skip


def written(folder: Path, name: str) -> Path:
    for file, text in SPECIMENS[name][0].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(text.encode())
    return folder / next(iter(SPECIMENS[name][0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_has_the_prompts_kinds_and_questions_of_its_authors(name, tmp_path):
    _, text, kind, metadata = SPECIMENS[name]
    written(tmp_path, name)
    record = benchmark_prompts(name, tmp_path)[-1]
    assert record.text == text and record.metadata.get("tag", "") == kind
    assert metadata.items() <= record.metadata.items()
    spec, server = PUBLISHED[name], {"model": "m"}
    if spec.judge:  # and its judge can be asked about it
        judge = load_reward(spec.judge, {**spec.args, "server": server})
        if "question_graph" in metadata or "vqa_list" in metadata:
            getattr(judge, "check")(text, record.metadata)  # noqa: B009


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_that_is_cut_empty_renamed_or_absent_is_refused_by_name(name, tmp_path):
    path = written(tmp_path, name)
    text, form = path.read_bytes(), path.suffix
    last = text.rstrip().rfind(b"\t" if form == ".tsv" else b"," if form == ".csv" else b"}")
    twins = {"cut": text[:last], "empty": b""} if form != ".txt" else {"empty": b""}
    for content in twins.values():
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(path.name)):
            benchmark_prompts(name, path)
    other = path.with_suffix(".md")
    path.rename(other)
    for source in (other, path, tmp_path):
        with pytest.raises(UserError, match=f"expected.*{re.escape(PUBLISHED[name].url)}"):
            benchmark_prompts(name, source)


@pytest.mark.parametrize(
    ("name", "old", "new", "place"),
    [
        ("geneval2", '"vqa_list"', '"questions"', r"line 1.*'vqa_list'"),
        ("dpg", "question_natural_language", "question", r"line 2.*'question_natural_language'"),
        ("dpg", '"1, 2"', '"one"', r"line 4.*one"),
        ("oneig", "prompt_en", "prompt_cn", r"line 2.*'prompt_en'"),
        ("oneig", "Portrait,001", "Portrait,002", r"human.json, entry '002'.*'dependency'"),
        ("wise", '"Explanation"', '"Why"', r"row 1.*'Explanation'"),
        ("drawbench", "Prompts", "Prompt", r"line 2.*'Prompts'"),
        ("partiprompts", "\t\n", "\n", r"line 2.*3 cells, expected 4"),
    ],
)
def test_a_file_with_another_column_is_refused_with_its_line_and_column(
    name, old, new, place, tmp_path
):
    path = written(tmp_path, name)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=place):
        benchmark_prompts(name, path)


def test_a_benchmark_by_name_says_what_it_lacks_and_counts_its_prompts(tmp_path, capsys):
    path = written(tmp_path, "partiprompts")
    for words, said in (
        (["wise", "tiny-sd3", "--args", "{server: {model: m}}"], "WISE_legacy"),
        (["partiprompts", "tiny-sd3", "--prompts", str(path)], "--reward"),
        (["partiprompts", "tiny-sd3", "--prompts", str(path), "--reward", "brightness", "-o",
          str(tmp_path / "images"), "--per-prompt", "1", "--steps", "1", "--guidance", "1",
          "--device", "cpu", "--max-sequence-length", "12"], "1 prompts of 1632"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(["benchmark", *words])
        assert bool(end.value.code) == (said != "1 prompts of 1632")
        assert said in capsys.readouterr().err
    assert "brightness" in (tmp_path / "images" / "scores.csv").read_text()

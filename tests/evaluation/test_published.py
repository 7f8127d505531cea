"""Prompt files as their authors publish them, a few rows each, and broken twins."""

import json
import re
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.evaluation.benchmark import benchmark_prompts
from flowrl.evaluation.published import PUBLISHED
from flowrl.scoring.spec import load_reward

TOYS = {"prompt": "two metal toys", "atom_count": 3, "skills": ["count"],
        "vqa_list": [["How many toys are in the image?", "two"]]}  # fmt: skip
BENCH = {"tag": "single_object", "prompt": "a photo of a bench",
         "include": [{"class": "bench", "count": 1}]}  # fmt: skip
PASTRY = {"Prompt": "A pastry", "Explanation": "mooncakes", "Category": "Biology", "prompt_id": 1}
OLD = {"question": '{"1": "A boy?", "2": "Old?"}', "dependency": '{"1": [0], "2": [1]}'}
APPLES = """item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,\
question_natural_language
0,Ripe apples.,,1,0,entity,whole,entity - whole (apples),Are there apples?
7,A cat on a mat.,,1,0,entity,whole,entity - whole (cat),A cat?
7,A cat on a mat.,,2,0,entity,whole,entity - whole (mat),A mat?
7,A cat on a mat.,,3,"1, 2",relation,spatial,"relation - spatial (cat, mat, on)",On it?
"""
SIGNS = """category,id,prompt_en,type,prompt_length,class
Text_Rendering,000,A sign,NP,short,
Portrait,001,"a boy, old","T, P",long,
"""
CAT = [("A cat?", []), ("A mat?", []), ("On it?", [0, 1])]
SPECIMENS = {  # the files; text, kind and some metadata of the last prompt
    "geneval": ({"evaluation_metadata.jsonl": json.dumps(BENCH) + "\n"}, "a photo of a bench",
                "single_object", {"include": BENCH["include"]}),
    "geneval2": ({"geneval2_data.jsonl": json.dumps(TOYS) + "\n"}, "two metal toys", "03",
                 {"vqa_list": TOYS["vqa_list"]}),
    "dpg": ({"dpg_bench.csv": APPLES}, "A cat on a mat.", "",
            {"item_id": "7", "question_graph": CAT}),
    "oneig": ({"OneIG-Bench.csv": SIGNS,
               "scripts/alignment/Q_D/human.json": json.dumps({"001": OLD})},
              "a boy, old", "Portrait", {"question_graph": [("A boy?", []), ("Old?", [0])]}),
    "t2i_compbench": ({name: "a green bench and a blue bowl\r\ntwo boys"
                       for name in PUBLISHED["t2i_compbench"].files}, "two boys", "complex", {}),
    "wise": ({name: json.dumps([PASTRY], indent=2) for name in PUBLISHED["wise"].files},
             "A pastry", "Biology", {"Explanation": "mooncakes"}),
    "drawbench": ({"drawbench.csv": "Prompts,Category\nA car.,Colors"}, "A car.", "Colors", {}),
    "partiprompts": ({"PartiPrompts.tsv": 'Prompt\tCategory\tChallenge\tNote\n"G I G\tArts\tB\t\n'},
                     '"G I G', "Arts", {"Challenge": "B"}),
}  # fmt: skip


def written(folder: Path, name: str) -> Path:
    for file, text in SPECIMENS[name][0].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(text.encode())
    return folder / next(iter(SPECIMENS[name][0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_and_one_cut_empty_renamed_or_absent_is_refused(name, tmp_path):
    _, text, kind, metadata = SPECIMENS[name]
    path, spec = written(tmp_path, name), PUBLISHED[name]
    record = benchmark_prompts(name, tmp_path)[-1]
    assert record.text == text and record.metadata.get("tag", "") == kind
    assert metadata.items() <= record.metadata.items()
    if spec.judge:
        server = {} if name == "geneval" else {"server": {"model": "m"}}
        judge = load_reward(spec.judge, {**spec.args, **server})
        getattr(judge, "check", lambda *_: None)(text, record.metadata)
    whole, ends = path.read_bytes(), {".tsv": b"\t", ".csv": b",", ".txt": b"a"}
    for content in (whole[: whole.rstrip().rfind(ends.get(path.suffix, b"}"))], b""):
        path.write_bytes(content if path.suffix != ".txt" else b"")
        with pytest.raises(UserError, match=re.escape(path.name)):
            benchmark_prompts(name, path)
    other = path.rename(path.with_suffix(".md"))
    for source in (other, path, tmp_path, None):
        if source or name != "drawbench":  # which is on the Hub
            with pytest.raises(UserError, match=f"expected.*{re.escape(spec.url)}"):
                benchmark_prompts(name, source)


@pytest.mark.parametrize(
    ("name", "old", "new", "place"),
    [
        ("geneval2", '"vqa_list"', '"questions"', r"line 1.*'vqa_list'"),
        ("dpg", '"1, 2"', '"one"', r"line 3, item_id '7'.*one"),
        ("oneig", "Portrait,001", "Portrait,002", r"human.json, entry '002'.*'dependency'"),
        ("wise", '"Explanation"', '"Why"', r"row 1.*'Explanation'"),
        ("oneig", 'old",', "old,", r"line 3.*row of a table"),
        ("partiprompts", "\t\n", "\n", r"line 2.*3 cells, expected 4"),
    ],
)
def test_another_column_is_refused_with_its_line_and_name(name, old, new, place, tmp_path):
    path = written(tmp_path, name)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=place):
        benchmark_prompts(name, path)


def test_a_benchmark_by_name_says_what_it_lacks_and_counts_its_prompts(tmp_path, flowrl):
    parti = ["partiprompts", "tiny-sd3", "--prompts", str(written(tmp_path, "partiprompts"))]
    fast = "--per-prompt 1 --steps 1 --guidance 1 --device cpu --max-sequence-length 12".split()
    (tmp_path / "own.jsonl").write_text('{"prompt": "a red star"}\n')
    own = [str(tmp_path / "own.jsonl"), "tiny-sd3", "-o", str(tmp_path / "own")]
    for words, said in (
        (["wise", "tiny-sd3", "--args", "{server: {model: m}}"], "WISE_legacy"),
        (parti, "--reward"),
        ([*parti, "--reward", "brightness", "-o", str(tmp_path / "i"), *fast], "1 prompts of 1632"),
        ([*own, "--reward", "brightness", *fast], ""),
    ):
        code, _, err = flowrl("benchmark", *words)
        assert bool(code) == (words[-1] != "12") and said in err
    for folder in ("i", "own"):
        assert "brightness" in (tmp_path / folder / "scores.csv").read_text()

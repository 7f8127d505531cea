"""README and docs/architecture.md: commands and examples run, names and links lead somewhere."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch
import typer

from flowrl.backbones.loading import pipeline_path
from flowrl.backbones.lora_files import read_lora
from flowrl.bench.certify import not_run_sentence
from flowrl.cli import app
from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.config.load import preset_names
from flowrl.planning.duration import RATES
from flowrl.training.tracking import read_metrics
from scripts.compare.data import TIMES, read_rows
from scripts.compare.page import at_steps, load_page
from scripts.compare.report import Results, guided_table, scores_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    parts = text.split("```")[1::2]  # what stands between two fences
    found = [part.partition("\n") for part in parts]
    return [block for name, _, block in found if name == language]


def test_it_is_short_has_the_test_command_and_its_links_lead_somewhere():
    assert README.count("\n") <= 150
    assert '\npip install ".[test]" && pytest -q -n 2\n' in README
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "README.md"):
        links = re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)|src="([^"]+)"', page.read_text())
        assert links and all((page.parent / (a or b)).exists() for a, b in links), page
    listed = set(re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", INDEX, re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_results_are_recomputed_from_the_data_in_the_gallery():
    page = load_page("quickstarts")
    results = Results.read(page, ROOT / "gallery" / "quickstarts")
    found = {row["method"]: row for row in scores_table(results)}
    columns = (
        "tiny_judge, own steps", "change over seeds, own steps",
        "tiny_judge, 28 steps", "change over seeds, 28 steps",
    )  # fmt: skip
    rows = re.findall(r"^\| `flowrl train ([\w-]+)` \| (.+) \|$", README, re.MULTILINE)
    assert rows
    for name, text in rows:
        assert tuple(text.split(" | ")) == tuple(found[name][column] for column in columns), name
        assert len(results.lines[name]) == 5, name
        for at in ("own steps", "28 steps"):
            low, high = map(float, re.findall(r"-?\d\.\d+", found[name][f"over images, {at}"])[1:])
            assert round((high - low) / 2, 2) in (0.04, 0.05), (name, at)  # "±0.04 to ±0.05 wide"
            gain, least, _ = map(
                float, re.findall(r"-?\d\.\d+", found[name][f"change over seeds, {at}"])
            )
            assert gain >= 0.2 and min(low, least) > 0.1, (name, at)
        bases = [results.base(name, measure) for measure in at_steps(page, page.score).values()]
        assert 0.45 <= min(bases) <= max(bases) <= 0.7 and abs(bases[0] - bases[1]) <= 0.05, name
    guided = guided_table(results, ROOT / "gallery" / "quickstarts")
    assert [row["method"] for row in guided] == [name for name, _ in rows]
    for row, pipeline in zip(guided, ("SD3", "FLUX", "SANA"), strict=True):
        for what in ("the base's best", "aligned above the best"):
            pair = " and ".join(row[f"{what}, {at}"] for at in ("own steps", "28 steps"))
            assert f"{pair} ({pipeline})" in " ".join(README.split()), (what, pair)
    for row in read_rows(ROOT / "gallery" / "quickstarts" / "guidance.csv"):
        if row["guidance"] == "1":  # that of the runs
            for measure in at_steps(page, page.score).values():
                assert float(row[measure]) == results.base(row["method"], measure)
    old = found["quickstart-flux, guidance 2"]
    ends, gains = (
        " and ".join(old[f"{what}, {at}"].split()[place] for at in ("own steps", "28 steps"))
        for what, place in (("tiny_judge", -1), ("change over seeds", 0))
    )
    assert f"with guidance 2 five seeds gained {gains}, but to {ends}" in " ".join(README.split())
    random = "Random rewards"
    base = results.base(random, page.score)
    lost = [f"{base - score:.3f}" for score in results.last(random, page.score)]
    assert f"five runs lost {', '.join(lost[:4])} and {lost[4]}" in " ".join(README.split())


def test_the_quickstarts_of_the_gallery_trained_for_less_than_four_minutes():
    took = []
    for name in ("quickstart", "quickstart-flux", "quickstart-sana"):
        rows = [row for row in read_metrics(ROOT / "gallery" / name) if "loss" in row]
        assert len(rows) == load_config(name).run.iterations, name
        took.append(sum(row.get(part) or 0.0 for row in rows for part in TIMES))
    assert max(took) < 240
    assert f"({took[0]:.0f} seconds on two idle CPU cores)" in README
    told = " ".join(load_page("quickstarts").text.split())
    assert f"({took[0]:.0f}, {took[1]:.0f} and {took[2]:.0f} seconds in the gallery's runs)" in told


def test_the_ceilings_are_those_that_were_scored():
    world = " ".join((ROOT / "docs" / "tiny-world.md").read_text(encoding="utf-8").split())
    for name, said in (
        ("tiny-sd3", "{} at 8 and 28 steps (SD3)"), ("tiny-sana", "{} (SANA)"),
        ("tiny-flux", "at least {} at 10 and 28 steps (FLUX)"),
    ):  # fmt: skip
        found = json.loads((Path(pipeline_path(name)) / "scores.json").read_text())
        scores, images = found["ceiling"], found["images"]
        assert images["preset"] == images["28 steps"] == 360 / 6  # of each of six kinds
        assert found["lower_bound"] == ("at least" in said)
        each = [scores[at]["judge"]["GenEval, mean"] for at in ("preset", "28 steps")]
        assert min(each) >= 0.9
        bases = [found["base"][at]["judge"]["GenEval, mean"] for at in ("preset", "28 steps")]
        for pair in (each, bases):
            assert " and ".join(f"{score:.2f}" for score in pair) in world, (name, pair)
        assert said.format(" and ".join(f"{score:.2f}" for score in each)) in " ".join(
            README.split()
        )


def test_every_command_of_the_readme_and_the_index_exists():
    group = typer.main.get_command(app)
    lines = [line for block in blocks(README, "bash") for line in block.splitlines()]
    words = [shlex.split(line.partition("&& ")[2] or line, comments=True) for line in lines]
    words += [shlex.split(command) for command in re.findall(r"`(flowrl train [\w-]+)`", README)]
    words = [["train", *w[5:]] if w[0] == "accelerate" else w[1:] for w in words]
    words = [w for w in words if w[0] != "-q"]  # the tests
    assert len(words) >= 10
    for name, *rest in words:
        command = group.get_command(typer.Context(group), name)
        assert command is not None, name
        params = command.make_context(name, rest).params
        if name in ("train", "plan"):
            request = sort_arguments(params["words"])
            assert request.recipe.endswith(".yaml") or request.recipe in preset_names(), name
            assert load_config(request.recipe, request.overrides)
    named = set(re.findall(r"`flowrl ([\w-]+)", INDEX))
    assert named == set(group.commands)


def test_the_python_of_the_readme_trains_and_its_lora_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use, own = blocks(README, "python")
    short = '"run.iterations=1", "evaluation.prompts=null", "pipeline.device=cpu"]'
    assert '"run.iterations=60"]' in own
    exec(own.replace('"run.iterations=60"]', short), {})
    state, _ = read_lora("runs/red")
    assert any(torch.count_nonzero(tensor) for name, tensor in state.items() if "lora_B" in name)
    names: dict = {}
    exec(use.replace("runs/quickstart", "runs/red").replace(".images[0]", ".images"), names)
    assert names["settings"]["num_inference_steps"] == 8


def test_every_answer_of_the_architecture_page_is_where_it_says():
    rows = re.findall(r"^\| (.+) \| `([\w/]+\.py)` \| `(\w+)` \|$", ARCHITECTURE, re.MULTILINE)
    assert len(rows) == 11
    for question, file, name in rows:
        text = (ROOT / file).read_text()
        assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), question
    for file, names in re.findall(
        r"^ *([\w/]+\.py) {2,}([\w.]+(?:, [\w.]+)*) {2,}", ARCHITECTURE, re.M
    ):
        text = (ROOT / "flowrl" / file).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), (file, name)


def test_the_folder_trees_name_every_package_and_every_module():
    _, tree, _ = blocks(ARCHITECTURE, "")
    (short,) = blocks(README, "")
    for path in (ROOT / "flowrl").iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"  {path.name}/ " in tree and f" {path.name}/ " in short, path
            for module in path.glob("[a-z]*.py"):
                if path.name != "cli":
                    assert re.search(rf"\b{module.stem}\b", tree), module


def test_what_has_not_been_run_on_a_gpu_is_what_the_files_of_certify_lack():
    folder = ROOT / "gallery" / "gpu"
    sentence = " ".join(not_run_sentence(folder).split())
    assert sentence in " ".join(README.split()), f"the README has to say: {sentence}"
    page = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("*.json"):
        assert f"[{path.name}]({path.name})" in page, "run flowrl certify --page"
        record = json.loads(path.read_text(encoding="utf-8"))
        assert not [part for part, row in record["parts"].items() if "error" in row], path


def test_the_rates_that_plans_know_are_those_of_the_files_of_gpus():
    """Of a card's file, the median of its iterations' operations a second."""
    known = {}
    for path in (ROOT / "gallery" / "gpu").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        found = [row.get("operations_per_second") for row in record["parts"].values()]
        if record["machine"]["cards"] and any(found):
            known[record["machine"]["card"]] = statistics.median(filter(None, found))
    assert known == pytest.approx(dict(RATES), rel=0.01)

"""`flowrl recipes` and `flowrl init`: what there is to train, and a recipe of one's own."""

import json

import pytest

from flowrl.cli import main, recipes
from flowrl.cli.recipes import family_of, parent_of
from flowrl.config import load_config
from flowrl.config.load import preset_names
from flowrl.errors import UserError
from flowrl.planning.plan import make_plan


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_every_recipe_is_listed_with_what_decides_a_choice(capsys):
    code, out, _ = run(capsys, "recipes", "--json")
    rows = {row["recipe"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and list(rows) == preset_names()
    row = rows["sd3.5-medium-nft-24gb"]
    assert (row["method"], row["GPU"], row["ran"]) == ("DiffusionNFT", "24 GB", "no")
    assert rows["quickstart"]["GPU"] == "none" and rows["quickstart"]["ran"] == "yes"
    assert rows["quickstart"]["trained rewards"] == "geneval"
    _, some, _ = run(capsys, "recipes", "FLUX", "gdro", "--json")
    assert [json.loads(line)["recipe"] for line in some.splitlines()] == ["flux.1-dev-gdro-80gb"]
    assert run(capsys, "recipes", "nonesuch")[0] == 1


def test_names_fit_a_screen_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "recipes")[1]
    assert "DiffusionNFT " in out and all(name in out for name in preset_names())


def test_answers_become_a_recipe_that_says_what_it_is_and_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    file = tmp_path / "mine.yaml"
    answers = ["--model", "tiny-sana", "--prompts", str(tmp_path / "prompts.txt")]
    code, out, _ = run(capsys, "init", str(file), *answers, "--reward", "brightness", "--memory=0")
    assert code == 0 and f"flowrl train {file} --dry-run" in out
    assert "It fits this machine's memory" in out
    config = load_config(file)
    assert config.pipeline.path == "tiny-sana" and config.pipeline.backbone == "sana"
    assert config.prompts.held_out == 0.1 and config.evaluation.prompts is None
    assert [reward.name for reward in config.rewards] == ["brightness"]
    before = file.read_bytes()
    code, _, err = run(capsys, "init", str(file), *answers, "--reward", "ocr", "--memory=0")
    assert code == 1 and "is there already" in err and file.read_bytes() == before


def test_it_says_whether_the_card_holds_it_and_the_work_of_an_iteration(
    tmp_path, capsys, monkeypatch
):
    answers = ["--model", "stabilityai/stable-diffusion-3.5-medium", "--reward", "brightness"]
    answers += ["--prompts", "tiny:geneval:train", "--memory", "24GB"]
    file = tmp_path / "mine.yaml"
    code, out, _ = run(capsys, "init", str(file), *answers)
    assert code == 0 and "It fits a GPU of 24.0 GB, with " in out
    work = make_plan(load_config(file)).work.first
    assert f"draws {work.images:,} images by {work.sampling:,} forwards" in out
    # A parent that the card does not hold.
    monkeypatch.setattr(recipes, "parent_of", lambda *_: "sd3.5-medium-nft-80gb")
    large = tmp_path / "large.yaml"
    code, out, _ = run(capsys, "init", str(large), *answers)
    assert code == 0 and "It does not fit a GPU of 24.0 GB, with " in out
    assert f"flowrl plan {large} --memory 24GB says what to change" in out


def test_a_wrong_answer_writes_nothing(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    (tmp_path / "a.txt").write_text("a red circle\n")
    for answers, told in (
        (["--model", "tiny-sd3", "--prompts", "none.txt", "--memory=0"], "cannot read prompts"),
        (["--model", "me/strange", "--memory=0"], "its name says no family"),
        (["--model", "tiny-sd3", "--reward", "pikscore", "--memory=0"], "did you mean pickscore?"),
        (["--model", "black-forest-labs/FLUX.1-dev", "--memory=0"], "needs a GPU"),
        (["--model", "black-forest-labs/FLUX.1-dev", "--memory=4GB"], "the smallest is for"),
    ):
        rest = [] if "--reward" in answers else ["--reward", "brightness"]
        rest += [] if "--prompts" in answers else ["--prompts", str(tmp_path / "a.txt")]
        words = ["init", str(file), *answers, *rest]
        code, _, err = run(capsys, *words)
        assert code == 1 and told in " ".join(err.split()), err
    assert not file.exists()


def test_the_parent_is_of_the_pipelines_family_and_fits_the_card(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    assert family_of(str(tmp_path)) == "flux"
    assert parent_of("flux", 24 * 10**9, "x") == "flux.1-dev-nft-24gb"
    assert parent_of("sd3", 80 * 10**9, "sd3.5-medium") == "sd3.5-medium-nft-80gb"
    assert parent_of("sd3", 48 * 10**9, "sd3.5-large") == "sd3.5-large-grpo-fast-48gb"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenPipeline"}))
    with pytest.raises(UserError, match="is a QwenPipeline"):
        family_of(str(tmp_path))

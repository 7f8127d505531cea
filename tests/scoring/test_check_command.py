"""`flowrl reward-check`: what it prints, and when it fails."""

import json

import pytest
import typer
from typer.testing import CliRunner

from flowrl.cli.rewards import reward_check
from flowrl.errors import UserError

FAULTY = """
def good(images, prompts, metadata):
    return images.mean((1, 2, 3))

def shifts(images, prompts, metadata):
    return images.mean((1, 2, 3)) - images.mean()
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run the command -> exit code, output, the error it raised."""
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "checked_rewards.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(reward_check)

    def call(*words):
        result = CliRunner().invoke(app, list(words))
        if result.exception and not isinstance(result.exception, UserError | SystemExit):
            raise result.exception
        return result.exit_code, result.output, str(result.exception or "")

    return call


def test_a_line_or_an_object_for_each_reward_says_that_it_works_and_how_fast(check):
    code, out, _ = check("brightness", "compressibility")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("ok  brightness       1 fixture right, repeatable, scores 0.")
    assert "ms a call" in first and "images/s; brightness-1" in first
    assert second.startswith("ok  compressibility  1 fixture right")
    _, out, _ = check("brightness", "preference", "--json")
    bright, preference = map(json.loads, out.splitlines())
    assert (bright["reward"], bright["state"], bright["images"]) == ("brightness", "ok", 2)
    assert bright["seconds_p50"] > 0 and bright["images_per_second"] > 0
    assert (preference["state"], preference["seconds_p50"]) == ("missing", None)


def test_a_problem_is_marked_with_a_remedy_fails_and_spoils_no_other_reward(check, tmp_path):
    code, out, error = check("checked_rewards:good", "checked_rewards:shifts")
    assert code == 1 and error.endswith("the lines marked !! say why: checked_rewards:shifts.")
    good, bad, remedy = out.splitlines()
    assert good.startswith("ok  checked_rewards:good    8 plain images")
    assert bad.startswith("!!  checked_rewards:shifts  one image got")
    assert remedy.strip().startswith("Score each image by itself")
    (tmp_path / "half_written.py").write_text("def mine(:")
    code, out, error = check("half_written:mine", "brightness")
    assert code == 1 and error.endswith("say why: half_written:mine.")
    bad, *_, good = out.splitlines()
    assert bad.startswith("!!  half_written:mine  ") and "SyntaxError" in bad
    assert good.startswith("ok  brightness")


def test_what_is_missing_fails_when_it_was_named_and_not_among_all(check, monkeypatch):
    code, out, error = check("preference")
    assert code == 1 and out.startswith("--  preference  preferences are read from a store")
    assert "could not be asked, the lines marked -- say why: preference" in error
    few = {"brightness": "flowrl_rewards.brightness:Brightness"}
    monkeypatch.setattr(
        "flowrl.scoring.spec.BUILT_IN", few | {"preference": "flowrl_rewards.preference:Preference"}
    )
    code, out, _ = check("--all")
    assert code == 0 and "--  preference" in out and "ok  brightness" in out


def test_arguments_and_prompts_reach_the_reward(check, tmp_path):
    assert "ocr_strict" not in check("ocr")[1]
    code, out, _ = check("ocr", "--args", "{mode: strict}")
    assert code == 0 and "ocr-2/strict" in out
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    assert "12 plain images" in check("checked_rewards:good", "--prompts", "p.txt")[1]


def test_options_that_do_not_fit_are_a_sentence(check):
    for words, name in (
        ([], "--all"),
        (["ocr", "--all"], "--all"),
        (["ocr", "geneval", "--args", "{mode: strict}"], "give one name"),
        (["--all", "--server", "http://127.0.0.1:1"], "give one name"),
        (["ocr", "--args", "strict"], "--args is 'strict'"),
        (["ocr", "--args", "{mode"], "--args, line 1"),
        (["ocr", "--token-env", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN"),
    ):
        code, _, error = check(*words)
        assert code == 1 and name in error, words

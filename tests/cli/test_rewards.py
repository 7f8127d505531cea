"""`flowrl reward-check` and `flowrl reward-serve`: what they print and what they refuse."""

import socket

import pytest

from flowrl.cli.rewards import reward_serve
from flowrl.errors import UserError

USER_REWARDS = """
def good(images, prompts, metadata):
    return images.mean((1, 2, 3))

def shifts(images, prompts, metadata):
    return images.mean((1, 2, 3)) - images.mean()
"""


@pytest.fixture
def check(flowrl, tmp_path, monkeypatch):
    """Run reward-check -> exit code, output, the error it told."""
    (tmp_path / "checked_rewards.py").write_text(USER_REWARDS)
    monkeypatch.chdir(tmp_path)
    return lambda *words: flowrl("reward-check", *words)


def test_a_problem_fails_and_spoils_no_other_reward(check, tmp_path):
    code, out, error = check("checked_rewards:good", "checked_rewards:shifts")
    assert code == 1 and "checked_rewards:shifts" in error and "checked_rewards:good" not in error
    assert [line[:2] for line in out.splitlines()] == ["ok", "!!", "  "]
    (tmp_path / "half_written.py").write_text("def mine(:")
    code, out, error = check("half_written:mine", "brightness")
    assert code == 1 and "half_written:mine" in error and "SyntaxError" in out
    assert out.splitlines()[-1].startswith("ok  brightness")


def test_what_is_missing_fails_when_it_was_named_and_not_among_all(check, monkeypatch):
    code, out, error = check("preference")
    assert code == 1 and out.startswith("--  preference") and "preference" in error
    few = {name: f"flowrl_rewards.{name}:{name.title()}" for name in ("brightness", "preference")}
    monkeypatch.setattr("flowrl.scoring.spec.BUILT_IN", few)
    code, out, _ = check("--all")
    assert code == 0 and "--  preference" in out and "ok  brightness" in out


def test_arguments_and_prompts_reach_the_reward(check, tmp_path):
    code, out, _ = check("ocr", "--args", "{mode: strict}")
    assert code == 0 and "ocr-2/strict" in out
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    assert "12 plain images" in check("checked_rewards:good", "--prompts", "p.txt")[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["reward-check"], "--all"),
        (["reward-check", "ocr", "--all"], "--all"),
        (["reward-check", "ocr", "geneval", "--args", "{mode: strict}"], "--args"),
        (["reward-check", "ocr", "--args", "{mode"], "--args"),
        (["reward-serve", "compressability"], "'compressability'"),
        (["reward-serve", "compressibility", "--args", "{quality: 0}"], "quality"),
        (["reward-serve", "compressibility", "--args", "{}", "--args", "{}"], "2 times for 1"),
        (["reward-serve", "compressibility", "--args", "[]"], "names and values"),
        (["reward-serve", "compressibility", "--host", "0.0.0.0"], "--token-env"),
    ],
)
def test_options_that_do_not_fit_are_named(flowrl, words, named):
    code, _, error = flowrl(*words)
    assert code == 1 and named in error


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "loads_for_minutes.py").write_text("raise AssertionError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="Cannot listen at 127.0.0.1"):
            reward_serve(["loads_for_minutes:Reward"], port=taken.getsockname()[1])

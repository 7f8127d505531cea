"""`flowrl bench iteration`: what it asks for, what it prints; and the page of GPU measurements."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flowrl.bench.iteration import WORK, work_of
from flowrl.cli import explained
from flowrl.cli.bench import app

PAGE = (Path(__file__).parents[1] / "docs" / "gpu-bench.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^flowrl bench (.*)$", PAGE, re.MULTILINE)
ROW: dict[str, Any] = {"forward_share": 0.93, "phases": [{"phase": "decode", "seconds": 1.5}]}


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a bench without its measurements -> exit code, stdout, stderr, what was asked."""
    monkeypatch.setenv("NO_COLOR", "1")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "flowrl.bench.iteration.bench_iteration", lambda **a: asked.append(a) or dict(ROW)
    )
    monkeypatch.setattr("flowrl.bench.two_stage.bench_sizes", lambda **a: asked.append(a) or [])

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            explained(lambda: app(list(words), prog_name="flowrl bench"), debug=False)
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err, asked

    return call


def test_the_three_sizes_of_the_recipes_are_measured_by_default(run):
    code, out, _, asked = run("iteration", "--json")
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == [ROW] * 3
    assert [a["name"] for a in asked] == ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
    assert [a["work"] for a in asked] == [WORK["sd3"], WORK["flux"], WORK["sana"]]
    assert {a["layers"] for a in asked} == {None} and not any(
        a["gradient_checkpointing"] for a in asked
    )


def test_options_change_the_work(run):
    words = ["--size", "flux.1-dev", "--prompts", "3", "--micro-batch", "1"]
    _, _, _, (asked,) = run("iteration", *words, "--gradient-checkpointing", "--pixels", "256")
    assert asked["work"] == work_of("flux.1-dev", {"prompts": 3, "micro_batch": 1})
    assert asked["pixels"] == 256 and asked["gradient_checkpointing"]


def test_people_read_phases_first(run):
    _, out, _, _ = run("iteration", "--size", "flux.1-dev")
    assert re.search(r"phase +seconds\ndecode +1\.5\n\nwhat +is *\nforward_share +0\.93", out)


def test_an_unknown_size_is_refused_before_anything_is_measured(run):
    code, _, err, asked = run("iteration", "--size", "flux.1-dev", "--size", "nosuch")
    assert code == 1 and "there is no size 'nosuch'" in err and not asked


@pytest.mark.parametrize("words", COMMANDS)
def test_the_page_s_commands_are_understood(run, words):
    code, _, err, asked = run(*shlex.split(words))
    assert code == 0 and not err and asked


def test_the_page_says_that_nothing_was_run():
    assert "None of these has been run on a GPU yet." in PAGE

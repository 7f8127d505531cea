"""`flowrl bench`: what it asks for, what it prints; and the page of GPU measurements."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flowrl.bench.certify import not_run_sentence
from flowrl.bench.iteration import WORK, work_of
from flowrl.cli import report_errors
from flowrl.cli.bench import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu-bench.md").read_text(encoding="utf-8")
GPU_FILES = ROOT / "gallery" / "gpu"
TWO_STAGES: dict[str, Any] = {
    "two": 9.1, "q": 0.5, "measured": 1.13, "predicted": 1.154, "of_predicted": 1.13 / 1.154,
    "allowed": 1.1, "split": [{"part": "explore: sample", "seconds": 1.0}],
}  # fmt: skip
ITERATION: dict[str, Any] = {"forward_share": 0.93, "phases": [{"phase": "decode", "seconds": 1.5}]}


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a bench without its measurements -> exit code, stdout, stderr, what was asked."""
    monkeypatch.setenv("NO_COLOR", "1")
    asked: list[dict[str, Any]] = []
    for target, answer in (
        ("flowrl.bench.two_stage.bench_solrl", TWO_STAGES),
        ("flowrl.bench.two_stage.bench_sizes", [TWO_STAGES]),
        ("flowrl.bench.iteration.bench_iteration", ITERATION),
    ):
        record = lambda answer=answer, **a: asked.append(a) or answer.copy()  # noqa: E731
        monkeypatch.setattr(target, record)

    def padding(config, *, iterations):
        asked.append({"config": config, "iterations": iterations})
        return [{"phase": "both", "cost": 0.01}]

    monkeypatch.setattr("flowrl.bench.rollout.bench_padding", padding)

    def call(*words):
        asked.clear()
        with pytest.raises(SystemExit) as caught:
            report_errors(lambda: app(list(words), prog_name="flowrl bench"), debug=False)
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err, list(asked)

    return call


def test_a_pipeline_is_asked_for_the_published_counts_and_sizes_for_a_wider_first_stage_too(run):
    code, out, _, asked = run("solrl")
    assert code == 0 and [str(a["counts"]) for a in asked] == ["24/96@6/10"]
    assert re.search(r"two stages, s +9\.1", out) and "q: low-bit speed factor" in out
    last = "measured 1.130, predicted 1.154: 0.98 times, within 1.10"
    assert "explore: sample" in out and out.strip().splitlines()[-1] == last
    sizes = ("--size", "sana-1.6b", "--size", "flux.1-dev")
    _, _, _, asked = run("solrl", *sizes, "--scale", "0.25")
    assert [a["name"] for a in asked] == ["sana-1.6b", "flux.1-dev"]
    assert [str(plan) for plan in asked[0]["plans"]] == ["6/24@6/10", "4/32@4/10"]
    code, out, _, _ = run("solrl", "--json", "--counts", "2/6@2/3", "--counts", "3/6@2/3")
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == [TWO_STAGES] * 2


def test_padding_is_measured_of_any_recipe(run):
    code, out, _, (asked,) = run("padding", "rollout.batch_size=40", "--iterations", "2", "--json")
    assert code == 0 and json.loads(out) == {"phase": "both", "cost": 0.01}
    assert asked["config"].rollout.batch_size == 40 and asked["iterations"] == 2


def test_the_three_sizes_of_the_recipes_are_measured_by_default(run):
    code, out, _, asked = run("iteration", "--json")
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == [ITERATION] * 3
    assert [a["name"] for a in asked] == ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
    assert [a["work"] for a in asked] == [WORK["sd3"], WORK["flux"], WORK["sana"]]
    assert {a["layers"] for a in asked} == {None}
    assert not any(a["gradient_checkpointing"] for a in asked)
    words = ["--size", "flux.1-dev", "--prompts", "3", "--micro-batch", "1", "--pixels", "256"]
    _, out, _, (changed,) = run("iteration", *words, "--gradient-checkpointing")
    assert changed["work"] == work_of("flux.1-dev", {"prompts": 3, "micro_batch": 1})
    assert changed["pixels"] == 256 and changed["gradient_checkpointing"]
    assert re.search(r"phase +seconds\ndecode +1\.5\n\nwhat +is *\nforward_share +0\.93", out)


def test_the_commands_of_the_page_are_understood(run):
    commands = re.findall(r"^flowrl bench (.*)$", PAGE, re.MULTILINE)
    for words in commands:
        code, _, err, asked = run(*shlex.split(words))
        assert code == 0 and not err and asked, words
    assert commands


def test_the_page_says_that_nothing_has_run_as_long_as_no_gpu_s_file_is_there(tmp_path):
    nothing_ran = not_run_sentence(GPU_FILES) == not_run_sentence(tmp_path)
    assert ("None of these has been run on a GPU yet." in PAGE) == nothing_ran

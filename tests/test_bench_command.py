"""`flowrl bench solrl`: what it prints, and that its refusals are one sentence."""

import json
import re
from typing import Any

import pytest

from flowrl.cli import explained
from flowrl.cli.bench import app

ROW: dict[str, Any] = {
    "two": 9.1, "q": 0.5, "measured": 1.13, "predicted": 1.154, "of_predicted": 1.13 / 1.154,
    "allowed": 1.1, "split": [{"part": "explore: draw", "seconds": 1.0}],
}  # fmt: skip


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command, without its measurements -> exit code, stdout, stderr, what was asked."""
    monkeypatch.setenv("NO_COLOR", "1")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "flowrl.bench.two_stage.bench_solrl", lambda **a: asked.append(a) or dict(ROW)
    )
    monkeypatch.setattr(
        "flowrl.bench.two_stage.bench_sizes", lambda **a: asked.append(a) or [dict(ROW)]
    )

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            explained(lambda: app(["solrl", *words], prog_name="flowrl bench"), debug=False)
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err, asked

    return call


def test_a_pipeline_is_asked_for_the_published_counts_and_sizes_for_a_wider_first_stage_too(run):
    code, out, _, asked = run()
    assert code == 0 and "explore: draw" in out
    assert [str(a["counts"]) for a in asked] == ["24/96@6/10"]
    _, _, _, asked = run("--size", "sana-1.6b", "--size", "flux.1-dev", "--scale", "0.25")
    assert [a["name"] for a in asked[1:]] == ["sana-1.6b", "flux.1-dev"]
    assert [str(plan) for plan in asked[1]["plans"]] == ["6/24@6/10", "4/32@4/10"]


def test_people_read_what_numbers_are_and_the_verdict_last(run):
    _, out, _, _ = run()
    assert re.search(r"two stages, s +9\.1", out) and "q: low-bit speed factor" in out
    last = "measured 1.130, predicted 1.154: 0.98 times, within 1.10"
    assert out.strip().splitlines()[-1] == last


def test_a_row_is_one_json_object(run):
    code, out, _, _ = run("--json", "--counts", "2/6@2/3", "--counts", "3/6@2/3")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [ROW, ROW]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--counts", "24/96"), "such as 24/96@6/10"),
        (("--counts", "9/6@2/3"), "keep is 9 of 6 candidates"),
        (("--scale", "0.1"), "whole numbers are expected"),
        (("--counts", "4/16@9/5"), "4/16@9/5 draw candidates in 9 steps, expected 2 to the 5"),
        (("--size", "sana-1.6b", "--size", "nosuch"), "expected one of sd3.5-large, sd3.5-medium"),
    ],
)
def test_counts_and_sizes_that_cannot_be_are_one_sentence(run, words, told):
    code, _, err, asked = run(*words)
    assert code and told in err and err.count("\n") == 1 and not asked

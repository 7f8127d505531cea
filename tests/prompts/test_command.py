"""`flowrl prompts`: files to train and evaluate on."""

import json

import pytest
import typer
from typer.testing import CliRunner

from flowrl.cli.data import prompts
from flowrl.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(prompts)

    def call(*words):
        result = CliRunner().invoke(app, list(words))
        if result.exception and not isinstance(result.exception, UserError | SystemExit):
            raise result.exception
        return result.exit_code, result.output, str(result.exception or "")

    return call


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ratios_and_sizes_of_the_user_are_used(run, tmp_path):
    options = ["--count", "3", "--held-out", "2", "--ratio", "1:0:0:0"]
    assert run("ocr", "-o", "o", *options)[0] == 0
    train, test = (rows(tmp_path / "o" / f"{name}.jsonl") for name in ("train", "test"))
    assert {len(row["ocr_text"].split()) for row in train + test} == {1}
    options = ["--count", "20", "--ratio", "0:1:0:0:0:0", "--held-out", "0"]
    assert run("geneval", "-o", "g", *options)[0] == 0
    train = rows(tmp_path / "g" / "train.jsonl")
    assert {row["tag"] for row in train} == {"counting"} and len(train) == 20
    assert not (tmp_path / "g" / "test.jsonl").exists()

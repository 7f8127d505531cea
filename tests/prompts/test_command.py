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


def test_words_classes_and_ratios_of_the_user_are_used(run, tmp_path):
    (tmp_path / "words.txt").write_text("ART\nBOX\nCUP\nDOG\nEGG\n")
    options = ["--words", "words.txt", "--ratio", "1:0:0:0"]
    assert run("ocr", "-o", "o", "--count", "3", "--held-out", "2", *options)[0] == 0
    train, test = (rows(tmp_path / "o" / f"{name}.jsonl") for name in ("train", "test"))
    words = {row["ocr_text"] for row in train + test}
    assert words == {"ART", "BOX", "CUP", "DOG", "EGG"}
    (tmp_path / "names.txt").write_text("cat\nwine glass\n")
    options = ["--classes", "names.txt", "--ratio", "0:1:0:0:0:0", "--held-out", "0"]
    assert run("geneval", "-o", "g", "--count", "20", *options)[0] == 0
    train = rows(tmp_path / "g" / "train.jsonl")
    assert {row["include"][0]["class"] for row in train} == {"cat", "wine glass"}
    assert not (tmp_path / "g" / "test.jsonl").exists()

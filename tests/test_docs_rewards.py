"""The page of rewards names every built-in one, options that exist and commands that work."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flowrl.cli import app
from flowrl.config import Config, parse_config
from flowrl.config.messages import walk
from flowrl.scoring.spec import BUILT_IN

PAGE = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_every_built_in_reward_is_in_the_table_once():
    rows = [line.split("|")[1] for line in PAGE.split("```")[0].splitlines() if line[:3] == "| `"]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(BUILT_IN)


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_every_recipe_on_the_page_is_valid(text):
    section = yaml.safe_load(text)
    config = parse_config({"prompts": {"train": "tiny:all:train"}} | section)
    assert len(config.rewards) == len(section["rewards"])


def test_every_executor_on_the_page_is_valid():
    executors = re.findall(r"^\| `(\{kind: [^`]*\})` \|", PAGE, re.MULTILINE)
    assert len(executors) == 4
    for text in executors:
        how = yaml.safe_load(text.replace("[...]", "['http://127.0.0.1:8400']"))
        rewards = [{"name": "ocr", "executor": how}]
        config = parse_config({"prompts": {"train": "tiny:ocr:train"}, "rewards": rewards})
        assert config.rewards[0].executor.kind == how["kind"]


def test_every_key_on_the_page_is_an_option():
    keys = {option.path for option in walk(Config)}
    tops = {key.partition(".")[0] for key in keys}
    words = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", PAGE))
    named = {key for key in words if key.partition(".")[0] in tops and not key.endswith(".md")}
    assert len(named) >= 4 and named <= keys


def test_lists_of_prompts_are_written_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = [words for words in COMMANDS if words[0] == "prompts"]
    for words in written:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    for kind in ("geneval", "ocr"):
        lines = {n: Path(f"prompts/{kind}/{n}.jsonl").read_text().splitlines() for n in SPLITS}
        assert [len(lines[n]) for n in SPLITS] == [2000, 200]
        assert not set(lines["train"]) & set(lines["test"])


SPLITS = ("train", "test")

"""The page of objectives names every kind, and only options that exist."""

import re
import shlex
from pathlib import Path
from typing import get_args

from flowrl.config import Config, load_config
from flowrl.config.messages import walk
from flowrl.config.objectives import Objective

PAGE = (Path(__file__).parents[1] / "docs" / "objectives.md").read_text(encoding="utf-8")


def test_every_kind_is_in_the_table():
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == kinds


def test_every_key_on_the_page_is_an_option():
    keys = {option.path for option in walk(Config)}
    tops = {key.partition(".")[0] for key in keys}
    named = {
        key
        for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", PAGE)
        if key.partition(".")[0] in tops
    }
    assert len(named) >= 8 and named - keys <= {"objective.md", "objectives.md"}


def test_the_recipes_of_the_commands_on_the_page_exist():
    commands = [line for line in PAGE.splitlines() if line.startswith("flowrl train quickstart")]
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command)[3:] if "=" in word]
        assert load_config("quickstart", words)

"""The page of memory: its options exist, its commands are possible."""

import re
import shlex
from pathlib import Path

import pytest

from flowrl.config import Config, load_config
from flowrl.config.load import sort_arguments
from flowrl.config.sections import MemoryOptions

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
OPTIONS = set(re.findall(r"`(\w+)\.(\w+)[=`]", PAGE))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_possible(words):
    assert words[0] == "train"
    request = sort_arguments(words[1:])
    load_config(request.recipe, request.overrides)


def test_every_option_exists_and_all_of_the_section_are_told():
    known = {
        (name, option)
        for name, field in Config.model_fields.items()
        for option in getattr(field.annotation, "model_fields", {})
    }
    options = {pair for pair in OPTIONS if pair[0] != "flowrl"}
    assert options <= known
    told = {name for section, name in options if section == "memory"} | {"base_library"}
    assert told == set(MemoryOptions.model_fields)


def test_the_extras_exist():
    extras = re.findall(r"pip install \"\.\[(\w+)\]", PAGE)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert len(extras) == 2 and all(f"\n{extra} = [" in text for extra in extras)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / link).is_file()

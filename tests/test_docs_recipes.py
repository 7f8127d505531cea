"""The page of recipes lists every one of them, as it is."""

import re
import shlex
from pathlib import Path

import pytest

from flowrl.config import Config, load_config
from flowrl.config.load import preset_folder, preset_names, sort_arguments
from flowrl.config.messages import walk

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_every_recipe_has_a_row_and_every_row_a_recipe():
    names = re.findall(r"^\| `((?:quickstart|[\w.]+-)[\w.-]*)`", PAGE, re.MULTILINE)
    assert sorted(names) == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_a_row_is_what_the_recipe_says(name):
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", PAGE, re.MULTILINE)
    learns, rewards, *rest = row.split(" | ")
    config = load_config(name)
    assert learns.startswith(f"`{config.objective.kind}`")
    assert ("24 of 96" in learns) == (config.rollout.explore is not None)
    assert ("trees" in learns) == config.rollout.tree.kind.startswith("branch")
    trained = [f"`{reward.name}`" for reward in config.rewards if not reward.held_out]
    assert rewards == ", ".join(trained)
    if rest:
        hardware, source = rest
        text = re.sub(r"\s+#?\s*", " ", (preset_folder() / f"{name}.yaml").read_text())
        gpus, memory = hardware.removesuffix(" GB").split(" x ")
        assert f"Hardware: {gpus} GPU{'s' * (gpus != '1')} of {memory} GB" in text
        assert f"arXiv {source.rpartition(' ')[2]}" in text


def test_every_command_is_possible():
    assert len(COMMANDS) >= 8
    for words in COMMANDS:
        if "--num_processes" in words:
            words = words[words.index("scripts/train_sd3.py") :]
        kept = [word for word in words[1:] if word not in ("--print-config", "--dry-run")]
        while any(word in ("--memory", "--gpus") for word in kept):
            at = next(i for i, word in enumerate(kept) if word in ("--memory", "--gpus"))
            del kept[at : at + 2]
        request = sort_arguments(kept)
        assert load_config(request.recipe, request.overrides)


def test_every_key_on_the_page_is_an_option():
    keys = {option.path for option in walk(Config)}
    tops = {key.partition(".")[0] for key in keys}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", PAGE)
    asked = {key for key in named if key.partition(".")[0] in tops}
    assert len(asked) >= 8 and asked <= keys

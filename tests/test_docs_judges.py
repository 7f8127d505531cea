"""What the page of judges says can be written, can be written."""

import re
from pathlib import Path

import pytest
import yaml

from flowrl.scoring.spec import load_reward

PAGE = (Path(__file__).parents[1] / "docs" / "judges.md").read_text(encoding="utf-8")
SERVER = {"model": "m"}


def test_the_recipe_makes_a_judge():
    (recipe,) = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    for reward in recipe["rewards"]:
        assert load_reward(reward["name"], reward["args"]).name == "vlm_judge"


@pytest.mark.parametrize(
    "name, args",
    [
        (row[0], yaml.safe_load(f"{{{row[1]}}}"))
        for row in re.findall(r"^\| `(\w+)`(?:, `(.*?)`)?", PAGE, re.MULTILINE)
    ],
    ids=str,
)
def test_every_reward_of_the_table_is_there(name, args):
    assert callable(load_reward(name, {"server": SERVER, **args}))


def test_the_numbers_of_questions_are_right():
    from rewards.pairwise import chosen_pairs

    assert 2 * len(chosen_pairs(24)) == 552 and "552 for 24" in PAGE
    assert 2 * len(chosen_pairs(24, 6)) == 144 and "`rivals: 6` makes that 144" in PAGE


def test_the_defaults_are_right():
    from rewards.chat.client import Chat
    from rewards.vlm_judge import VLMJudge

    chat = Chat("m")
    for name in ("timeout", "deadline", "in_flight", "rounds"):
        (said,) = re.findall(rf"`{name}`\s+\((\d+)", PAGE)
        assert getattr(chat, name) == int(said)
    (said,) = re.findall(r"`longest`\s+\((\d+)\)", PAGE)
    assert VLMJudge(SERVER).longest == int(said)

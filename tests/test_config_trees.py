"""Trees in recipes: what cannot work is refused, and what is recommended instead works."""

import pytest

from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.recipe import merge, parse_overrides

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}
FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
TREE = "rollout.tree={kind: branch_grpo, %s}"


def parse(overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


@pytest.mark.parametrize(
    ("overrides", "sentence", "mended"),
    [
        ([FAST % "{kind: random, size: 9}"], "window.size is 9.* is 7", "size=7"),
        ([FAST % "{kind: fixed, size: 4, start: 5}"], "window.size is 4.* is 2", "size=2"),
        ([FAST % "{kind: fixed, size: 2, start: 7}"], "window.start is 7.* is 5", "start=5"),
        ([FAST % "{kind: random, size: 2, stop: 8}"], "window.stop is 8.* is 7", "stop=7"),
        ([FAST % "{kind: progressive, size: 4, stop: 3}"], "window.size is 4.* is 3", "size=3"),
    ],
)
def test_an_impossible_window_is_refused_and_the_suggestion_works(overrides, sentence, mended):
    with pytest.raises(UserError, match=sentence):
        parse(overrides)
    parse([*overrides, f"rollout.tree.window.{mended}"])


def test_a_window_may_reach_but_not_cover_the_last_step():
    assert parse([FAST % "{kind: fixed, size: 7}"]).rollout.tree.window.size == 7
    with pytest.raises(UserError, match="rollout.tree.window.size is 8"):
        parse([FAST % "{kind: fixed, size: 8}"])


@pytest.mark.parametrize(
    ("overrides", "sentence", "mended"),
    [
        ([TREE % "splits: [0, 12]"], "splits has step 12 .* is 6", "rollout.tree.splits=[0, 6]"),
        (
            [TREE % "splits: [0, 1]", "rollout.group_size=10"],
            "is 10.* 8 and 12",
            "rollout.group_size=8",
        ),
        ([TREE % "splits: [0]", "rollout.steps=1"], "rollout.steps is 1", "rollout.steps=2"),
        (
            [TREE % "splits: [0, 1]", "rollout.depth_pruning={start: 0, size: 8}"],
            "leaves no step to learn from",
            "rollout.depth_pruning.size=6",
        ),
        (
            [
                "rollout.tree={kind: dynamic_tree, gain_growth: 1.0}",
                "rollout.group_size=16",
                "rollout.kernel=cps",
                "rollout.noise_level=0.8",
            ],
            "1.75 times.*is 0.57",
            "rollout.noise_level=0.57",
        ),
        (
            [
                "rollout.tree={kind: dynamic_tree, gain_growth: 1.0}",
                "rollout.group_size=16",
                "rollout.kernel=renoise",
                "rollout.noise_level=1",
            ],
            "renoise always replaces all.*is 0",
            "rollout.tree.gain_growth=0",
        ),
    ],
)
def test_an_impossible_tree_is_refused_and_the_suggestion_works(overrides, sentence, mended):
    with pytest.raises(UserError, match=sentence):
        parse(overrides)
    parse([*overrides, mended])


def test_fans_are_compared_with_fans():
    fan = ["rollout.tree={kind: tempflow, at: [0, 1]}", "objective.credit.edges=fan"]
    with pytest.raises(UserError, match="objective.credit.scope is depth"):
        parse([*fan, "objective.credit.scope=depth"])
    assert parse([*fan, "objective.credit.scope=leaf"]).objective.credit.scope == "leaf"

"""What an option means."""

import pytest

from flowrl.config import Config
from flowrl.config.explain import default_text, explain
from flowrl.config.messages import walk
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError


def test_explain_says_meaning_type_default_and_source():
    text = explain("learning_rate")
    assert text.startswith("optim.lr\n")
    for part in ("number, above 0", "0.0003", "Flow-GRPO"):
        assert part in text


def test_every_option_has_a_meaning_and_a_default_that_a_recipe_takes():
    options = list(walk(Config))
    assert all(option.meaning.strip() for option in options)
    assert len(explain().splitlines()) == len(Config.model_fields)
    for option in options:
        assert option.required or load_yaml(default_text(option)) is not ...
    for path in sorted({option.path for option in options})[::20]:  # each takes time
        assert path in explain(path) or path.replace(".0", "") in explain(path)


def test_a_section_has_its_own_options_once_and_names_those_below():
    text = explain("rollout")
    assert "\ntree = {kind: flow_grpo} (flowrl explain rollout.tree)" in text
    assert "window" not in text.replace("explain", "") and text.count("\nkernel = ") == 1
    windows = explain("rollout.tree.window")
    assert [line for line in windows.splitlines() if line.startswith("kind: ")] == [
        f"kind: {kind}" for kind in ("all", "fixed", "random", "progressive", "geometric")
    ]
    assert windows.count("  size = ") == 4
    assert "default: {kind: shared, strength: 4.0} for branch_grpo, branch_grpo_mix" in explain(
        "rollout.tree.coupling"
    )


def test_options_of_several_kinds_are_shown_once_for_each_that_differs():
    assert explain("rollout.tree.window.size").count("(when kind is") == 4
    assert "(when kind is branch_grpo)" in explain("rollout.tree.splits")


def test_explain_suggests_the_nearest_option():
    for key, near in [("optim.lrr", "optim.lr"), ("noise_lvl", "noise_level"),
                      ("learning_rte", "learning_rate")]:  # fmt: skip
        with pytest.raises(UserError, match=f"{near}"):
            explain(key)

"""What an option means."""

import pytest

from flowrl.config import Config
from flowrl.config.explain import explain
from flowrl.config.messages import walk
from flowrl.errors import UserError


def test_explain_says_meaning_type_default_and_source():
    text = explain("learning_rate")
    assert text.startswith("optim.lr\n")
    for part in ("number, above 0", "0.0003", "Flow-GRPO"):
        assert part in text


def test_explain_shows_every_option_and_every_option_has_a_meaning():
    options = list(walk(Config))
    for path in sorted({option.path for option in options})[::6]:  # each takes time
        assert path in explain(path)
    assert all(option.meaning.strip() for option in options)
    assert len(explain().splitlines()) == len(Config.model_fields)


def test_options_of_several_kinds_are_shown_once_for_each_that_differs():
    assert explain("rollout.tree.window.size").count("(when kind is") == 4
    assert "(when kind is branch_grpo)" in explain("rollout.tree.splits")


def test_explain_suggests_the_nearest_option():
    for key, near in [("optim.lrr", "optim.lr"), ("noise_lvl", "noise_level"),
                      ("learning_rte", "learning_rate")]:  # fmt: skip
        with pytest.raises(UserError, match=f"{near}"):
            explain(key)

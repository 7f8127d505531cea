"""What an option means, told on the command line."""

import pytest

from flowrl.config import Config
from flowrl.config.explain import explain
from flowrl.config.messages import walk
from flowrl.errors import UserError


def test_explain_tells_meaning_type_default_and_source():
    text = explain("learning_rate")
    assert text.startswith("optim.lr\n  Learning rate.")
    for part in ("takes:   number, above 0", "default: 0.0003", "source:  Flow-GRPO"):
        assert part in text


def test_explain_shows_every_option():
    for path in sorted({option.path for option in walk(Config)})[::6]:  # each takes time
        assert path in explain(path)
    assert len(explain().splitlines()) == len(Config.model_fields)


def test_explain_tells_the_variants_of_an_option_apart():
    assert explain("rollout.tree.window.size").count("(when kind is") == 4
    assert "(when kind is branch_grpo)" in explain("rollout.tree.splits")


def test_explain_suggests_the_nearest_option():
    for key, near in [("optim.lrr", "optim.lr"), ("noise_lvl", "noise_level")]:
        with pytest.raises(UserError, match=f"Did you mean .*{near}"):
            explain(key)

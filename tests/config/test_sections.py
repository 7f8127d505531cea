"""Rules between sections that have no test of their own elsewhere."""

import pytest

from flowrl.config.rollout import RolloutOptions, StoreOptions
from flowrl.config.sections import (
    EvaluationOptions,
    PromptOptions,
    RunOptions,
    StopWhenHackingOptions,
)
from flowrl.config.validate import check_retained, check_stopping

PLAIN = RolloutOptions()
STORED = RolloutOptions.model_validate({"store": {"path": "stores/a"}})
EXPLORED = RolloutOptions.model_validate({"explore": {}})


def asks(retained=None):
    return PromptOptions(train="a.jsonl", retained=retained)


def test_rules_between_sections_are_checked():
    for retained in [None, 0, 1, 7]:
        check_retained(asks(retained), PLAIN, 8)
    for retained, trees, nearest in [(8, 8, 7), (12, 8, 7), (1, 1, 0)]:
        with pytest.raises(ValueError, match=f"the nearest valid value is {nearest}, or null"):
            check_retained(asks(retained), PLAIN, trees)
    for rollout, words in [(STORED, "an image without the words"), (EXPLORED, "set one of the")]:
        check_retained(asks(), rollout, 8)
        with pytest.raises(ValueError, match=words):
            check_retained(asks(2), rollout, 8)
    run = RunOptions(stop_when_hacking=StopWhenHackingOptions(held_out="quality"))
    check_stopping(run, EvaluationOptions(every=10))
    check_stopping(RunOptions(), EvaluationOptions())
    with pytest.raises(ValueError, match="evaluation.every is 0"):
        check_stopping(run, EvaluationOptions())
    for name in ("refresh_every", "cache_draws"):
        with pytest.raises(ValueError, match=f"store.{name} is set without rollout.store.path"):
            StoreOptions.model_validate({name: 4})
        assert getattr(StoreOptions.model_validate({"path": "a"}), name) is None
        assert getattr(StoreOptions.model_validate({"path": "a", name: 4}), name) == 4

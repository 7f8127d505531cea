"""Rules between sections that have no test of their own elsewhere."""

import pytest

from flowrl.config import parse_config
from flowrl.config.rollout import RolloutOptions, StoreOptions
from flowrl.config.sections import (
    EvaluationOptions,
    PromptOptions,
    RunOptions,
    StopWhenHackingOptions,
)
from flowrl.config.validate import check_retained, check_stopping
from flowrl.errors import UserError

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


def test_what_needs_the_whole_network_is_not_combined_with_one_in_parts():
    base = {"prompts": {"train": "a.txt"}, "rewards": [{"name": "brightness"}]}
    parts = base | {"runtime": {"shard": "node"}}
    assert parse_config(parts).runtime.shard == "node" and parse_config(base).runtime.shard is None
    explore = {"num_inference_steps": None, "candidates": 20}
    parse_config(parts | {"rollout": {"explore": explore | {"precision": "bf16"}}})
    for section, option in [
        ({"rollout": {"merge_lora": True}}, "rollout.merge_lora"),
        ({"rollout": {"compile": True}}, "rollout.compile"),
        ({"rollout": {"explore": explore}}, "rollout.explore.precision"),
        ({"pipeline": {"precision": "fp8"}}, "pipeline.precision"),
        ({"memory": {"base_bits": 8}}, "memory.base_bits"),
    ]:
        with pytest.raises(UserError, match=f"runtime.shard is node, and {option} needs"):
            parse_config(parts | section)

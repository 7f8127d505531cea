"""Rules between sections that have no test of their own elsewhere."""

import pytest

from flowrl.config.sections import (
    EvaluationOptions,
    PromptOptions,
    RunOptions,
    StopWhenHackingOptions,
    check_retained,
    check_stopping,
)


def test_rules_between_sections_are_checked():
    for retained in [None, 0, 1, 7]:
        check_retained(PromptOptions(train="a.jsonl", retained=retained), 8, store=False)
    for retained, trees, nearest in [(8, 8, 7), (12, 8, 7), (1, 1, 0)]:
        with pytest.raises(ValueError, match=f"the nearest valid value is {nearest}, or null"):
            check_retained(PromptOptions(train="a.jsonl", retained=retained), trees, store=False)
    check_retained(PromptOptions(train="a.jsonl"), 8, store=True)
    with pytest.raises(ValueError, match="a store keeps an image without the words"):
        check_retained(PromptOptions(train="a.jsonl", retained=2), 8, store=True)
    check_retained(PromptOptions(train="a.jsonl"), 8, store=False, explored=True)
    with pytest.raises(ValueError, match="set one of the two to null"):
        check_retained(PromptOptions(train="a.jsonl", retained=2), 8, store=False, explored=True)
    run = RunOptions(stop_when_hacking=StopWhenHackingOptions(held_out="quality"))
    check_stopping(run, EvaluationOptions(every=10))
    check_stopping(RunOptions(), EvaluationOptions())
    with pytest.raises(ValueError, match="evaluation.every is 0"):
        check_stopping(run, EvaluationOptions())

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


@pytest.mark.parametrize("retained", [None, 0, 1, 7])
def test_some_trees_are_left_for_paraphrases(retained):
    check_retained(PromptOptions(train="a.jsonl", retained=retained), 8, store=False)


@pytest.mark.parametrize(("retained", "trees", "nearest"), [(8, 8, 7), (12, 8, 7), (1, 1, 0)])
def test_retaining_all_trees_is_refused(retained, trees, nearest):
    with pytest.raises(ValueError, match=f"the nearest valid value is {nearest}, or null"):
        check_retained(PromptOptions(train="a.jsonl", retained=retained), trees, store=False)


def test_a_store_does_not_mix_wordings():
    check_retained(PromptOptions(train="a.jsonl"), 8, store=True)
    with pytest.raises(ValueError, match="a store keeps a picture without the words"):
        check_retained(PromptOptions(train="a.jsonl", retained=2), 8, store=True)


def test_words_are_not_chosen_by_their_scores():
    check_retained(PromptOptions(train="a.jsonl"), 8, store=False, explored=True)
    with pytest.raises(ValueError, match="set one of the two to null"):
        check_retained(PromptOptions(train="a.jsonl", retained=2), 8, store=False, explored=True)


def test_a_stop_rule_needs_evaluations_during_training():
    run = RunOptions(stop_when_hacking=StopWhenHackingOptions(held_out="quality"))
    check_stopping(run, EvaluationOptions(every=10))
    check_stopping(RunOptions(), EvaluationOptions())
    with pytest.raises(ValueError, match="evaluation.every is 0"):
        check_stopping(run, EvaluationOptions())

"""What the end of a run tells people."""

from typing import get_args

from flowrl.config import Config
from flowrl.evaluate import Comparison
from flowrl.functional.stats import Interval
from flowrl.handover import METHODS, OBJECTIVES, legend, method


def test_every_objective_has_a_name_for_the_card():
    section = Config.model_fields["objective"].annotation
    kinds = {kind.model_fields["kind"].default for kind in get_args(section)}
    assert len(kinds) >= 10 and kinds <= {"grpo", *OBJECTIVES}


def test_policy_gradients_are_told_by_their_tree_and_others_by_their_objective(tiny_config):
    tree = {"kind": "dance_grpo"}
    plain = tiny_config(rollout={"tree": tree})
    assert method(plain) == METHODS["dance_grpo"] == "DanceGRPO"
    assert method(tiny_config(rollout={"tree": tree}, objective={"kind": "nft"})) == "DiffusionNFT"
    explored = tiny_config(
        rollout={"tree": {"kind": "ode"}, "explore": {"candidates": 9, "steps": 2}},
        objective={"kind": "nft"},
    )
    assert method(explored) == "DiffusionNFT on 4 of 9 candidates (Sol-RL)"


def row(name: str) -> Comparison:
    change = Interval(mean=0.0, low=0.0, high=0.0)
    return Comparison(name=name, before=0.0, after=0.0, change=change, pairs=1)


def test_only_rows_that_are_more_than_a_score_are_explained():
    assert legend([row("ocr"), row("corrected")], "q") == ""
    assert legend([row("ocr"), row("corrected/ocr")], "q") == (
        "corrected/R is R (q - 3) + 0.2, picture by picture."
    )
    both = legend([row("corrected/ocr"), row("paraphrase/ocr"), row("paraphrase_gap/ocr")], "q")
    assert "corrected/R is" in both and "paraphrase_gap/R" in both

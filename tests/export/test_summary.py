"""What the end of a run says."""

from typing import get_args

from flowrl.config import Config
from flowrl.config.methods import OBJECTIVES, TREES, method_name
from flowrl.export.summary import legend, precisions, reward_curves
from flowrl.functional.contrasts import Contrast
from flowrl.sampling.rank_audit import FILE
from flowrl.training.evaluate import EvaluationComparison
from flowrl.utils.journal import seal_line


def test_the_method_is_named_by_tree_objective_and_choice_of_candidates(tiny_config):
    # Every objective has a name for the card.
    section = Config.model_fields["objective"].annotation
    kinds = {kind.model_fields["kind"].default for kind in get_args(section)}
    assert len(kinds) >= 10 and kinds <= {"grpo", *OBJECTIVES}
    # Policy gradients are told by their tree and others by their objective.
    tree = {"kind": "dance_grpo"}
    plain = tiny_config(rollout={"tree": tree})
    assert method_name(plain) == TREES["dance_grpo"] == "DanceGRPO"
    assert (
        method_name(tiny_config(rollout={"tree": tree}, objective={"kind": "nft"}))
        == "DiffusionNFT"
    )
    # The name says how candidates are chosen.
    for explore, told in [
        ({"candidates": 9}, "4 of 9 candidates (Sol-RL)"),
        ({"candidates": 4}, "4 of 4 candidates"),
        ({"candidates": 9, "select": "random"}, "4 of 9 candidates, chosen at random"),
        (
            {"candidates": 9, "select": "mean_deviation"},
            "4 of 9 candidates, those furthest from the mean",
        ),
    ]:
        explored = exploring(tiny_config, **explore)
        assert method_name(explored) == f"DiffusionNFT on {told}"


def exploring(tiny_config, pipeline=None, **explore):
    return tiny_config(
        pipeline=pipeline or {},
        rollout={"tree": {"kind": "ode"}, "explore": {"num_inference_steps": 2} | explore},
        objective={"kind": "nft"},
    )


def row(name: str) -> EvaluationComparison:
    change = Contrast(mean=0.0, low=0.0, high=0.0, p=1.0, images=1, prompts=1)
    return EvaluationComparison(name=name, before=0.0, after=0.0, change=change)


def test_the_legend_and_precisions(tiny_config, tmp_path):
    # Only rows that are more than a score are explained.
    assert legend([row("ocr"), row("corrected")], "q") == ""
    assert legend([row("ocr"), row("corrected/ocr")], "q") == (
        "corrected/R is R (q - 3) + 0.2, image by image."
    )
    both = legend([row("corrected/ocr"), row("paraphrase/ocr"), row("paraphrase_gap/ocr")], "q")
    assert "corrected/R is" in both and "paraphrase_gap/R" in both
    # The card tells the precision of training.
    assert precisions(tiny_config(), tmp_path, 1) == ""
    low = tiny_config(pipeline={"precision": "nvfp4-emulated"})
    assert precisions(low, tmp_path, 1) == "Rollouts and training: nvfp4-emulated."
    # The card tells what candidates were drawn in.
    config = exploring(tiny_config, precision="nvfp4-emulated")
    assert precisions(config, tmp_path, 9) == "Candidates: 2 steps, nvfp4-emulated."
    audits = [{"iteration": i, "rho": rho} for i, rho in ((0, 0.5), (8, 1.0), (16, 0.9))]
    (tmp_path / FILE).write_bytes(b"".join(seal_line(audit) + b"\n" for audit in audits))
    assert precisions(config, tmp_path, 16) == (
        "Candidates: 2 steps, nvfp4-emulated; last audit before iteration 9, rho 1.00."
    )


def test_reward_curves_leave_out_what_is_no_reward_and_what_is_missing():
    metrics = [
        {"step": 1, "reward/ocr": 0.1, "reward/mean": 0.5, "grad/norm": 1.0},
        {"step": 2, "reward/ocr": None, "reward/mean": 0.6, "reward/invalid": 0.5},
        {"step": 3, "reward/std_in_group": 0.2, "reward/missing/ocr": 0.0},
    ]
    assert reward_curves(metrics) == {"reward/mean": [(1, 0.5), (2, 0.6)], "reward/ocr": [(1, 0.1)]}
    assert list(reward_curves(metrics)) == ["reward/mean", "reward/ocr"]

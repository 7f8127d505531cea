"""Rules between sections: what cannot work together is refused, and the suggestion works."""

import pytest

from flowrl.config import parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.errors import UserError

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}
FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
STEPS = "rollout.num_inference_steps"
TREE = "rollout.tree={kind: branch_grpo, %s}"
PRUNED = "rollout.depth_pruning={%s}"


def parse(*overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


def test_an_impossible_tree_or_window_is_refused_and_the_suggestion_works():
    window, pruning = "rollout.tree.window.", "rollout.depth_pruning."
    split = TREE % "splits: [0, 1]"
    for overrides, sentence, mended in (
        ([FAST % "{kind: random, size: 9}"], "window has size 9.* 7", f"{window}size=7"),
        ([FAST % "{kind: fixed, size: 4, start: 5}"], "window has size 4", f"{window}size=2"),
        ([FAST % "{kind: fixed, size: 2, start: 7}"], "window .* start 7", f"{window}start=5"),
        ([FAST % "{kind: random, size: 2, stop: 8}"], "window .* stop 8", f"{window}stop=7"),
        ([TREE % "splits: [12, 9]"], "splits has step 12, .* 0 to 6", "rollout.tree.splits=[5, 6]"),
        ([split, "rollout.group_size=10"], "is 10.* 8 and 12", "rollout.group_size=8"),
        ([TREE % "splits: [0]", f"{STEPS}=1"], f"{STEPS} must be at least 2", f"{STEPS}=2"),
        ([split, PRUNED % "start: 0, size: 7, stop: 0"],
         "in iteration 0 rollout.tree has no step .* rollout.depth_pruning", f"{pruning}size=6"),
        ([split, PRUNED % "start: 2, size: 9"], "depth_pruning has size 9", f"{pruning}size=5"),
        ([split, PRUNED % "start: 9, size: 1"], "start 9.* 6", f"{pruning}start=6"),
        ([split, PRUNED % "start: 3, size: 1, stop: 2"], "stop 2", f"{pruning}stop=3"),
        ([split, PRUNED % "start: 2, size: 1, stop: 7"], "stop 7.* 6", f"{pruning}stop=6"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            parse(*overrides)
        parse(*overrides, mended)


def test_a_comparison_that_could_teach_nothing_or_the_opposite_is_refused():
    for tree, credit, name, mended in (
        ("flow_grpo", "scope=leaf", "scope", "scope=prompt"),
        ("flow_grpo", "edges=sibling", "edges", "edges=node"),
        ("flow_grpo", "keep=parent_top1", "keep", "keep=extreme"),
        ("branch_grpo, splits: [0, 1]", "edges=sibling scope=depth", "scope", "scope=leaf"),
        ("tempflow, splits: [0, 1]", "edges=fan scope=depth", "scope", "scope=leaf"),
    ):
        wanted = [f"objective.advantage.{option}" for option in credit.split()]
        with pytest.raises(UserError, match=f"objective.advantage.{name} "):
            parse(f"rollout.tree={{kind: {tree}}}", *wanted)
        parse(f"rollout.tree={{kind: {tree}}}", *wanted, f"objective.advantage.{mended}")


TRACKED = ["prompts.book={}", "objective.advantage.center=tracker"]


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["optim.updates_per_rollout=3"], "optim.updates_per_rollout", "2"),
        (["rollout.group_size=1"], "rollout.group_size", "2"),
        (["rollout.kernel=cps", "rollout.noise_level=1.5"], "rollout.noise_level", "1"),
        (["rollout.kernel=cps", "rollout.noise_level=1", "objective.kl_form=latent_no_dt"],
         "objective.kl_form", "latent_dt"),
        (["run.on_hacking={held_out: quality}"], "evaluation.every", "10"),
        (["runtime.shard=node", "rollout.merge_lora=true"], "rollout.merge_lora", "auto"),
        (["runtime.shard=node", "pipeline.compile=true"], "pipeline.compile", "false"),
        (["pipeline.compile=graphs", "rollout.merge_lora=true"], "rollout.merge_lora", "auto"),
        (
            ["pipeline.compile=graphs", "memory.gradient_checkpointing=true"],
            "memory.gradient_checkpointing",
            "false",
        ),
        (["runtime.shard=node", "rollout.explore={candidates: 20}"],
         "rollout.explore.precision", "bf16"),
        (["runtime.shard=node", "pipeline.precision=fp8"], "pipeline.precision", "null"),
        (["runtime.shard=node", "memory.base_bits=8"], "memory.base_bits", "null"),
        (["prompts.weights={colors: 3}"], "prompts.balance", "tag"),
        (["optim.replay=1", "objective={kind: nft}"], "optim.replay", "0"),
        (["reference.every=2", "objective.kl_coef=0"], "objective.kl_coef", "0.1"),
        (["objective.kl_on={reward: quality}"], "objective.kl_coef", "0.1"),
        (["run.on_hacking={}", "evaluation.every=9", "lora.init_from=a"], "lora.init_from", "null"),
        (["prompts.book={}", "rollout.staleness=1"], "rollout.staleness", "0"),
        (["prompts.book={}", "rollout.explore={candidates: 20}"], "rollout.explore", "null"),
        (["prompts.book={}", "rollout.store=groups"], "rollout.store", "null"),
        (["prompts.book={largest_group: 3}"], "prompts.book.largest_group", "99"),
        (["prompts.book={largest_group: 99}", "prompts.refiner={}"], "prompts.refiner", "null"),
        (["prompts.book={largest_group: 99}", "optim.updates_per_rollout=2"],
         "optim.updates_per_rollout", "1"),
        (["prompts.book={largest_group: 99}", "rollout.tree={kind: branch_grpo, splits: [0]}",
          "objective.advantage.scope=leaf"], "objective.advantage.scope", "prompt"),
        (["pipeline.compile=graphs", "objective={kind: refl}"], "objective", "{kind: grpo}"),
        (["rollout.look_ahead={}", "rollout.tree={kind: branch_grpo, splits: [0]}",
          "rollout.store=groups"], "rollout.look_ahead", "null"),
        (["objective.advantage.center=tracker"], "prompts.book", "{choose: uniform}"),
        (["objective.advantage.emphasis=1"], "prompts.book", "{choose: uniform}"),
        ([*TRACKED, "objective.advantage.rewards=gdpo"], "objective.advantage.rewards", "sum"),
        ([*TRACKED, "objective.advantage.scope=joint"], "objective.advantage.scope", "prompt"),
        (["prompts.book={}", "objective={kind: lair, advantage: {center: tracker}}"],
         "objective", "{kind: awm}"),
        (["prompts.refiner={}", "rollout.staleness=1"], "rollout.staleness", "0"),
        (["prompts.refiner={}", "rollout.explore={candidates: 20}"], "rollout.explore", "null"),
        (["prompts.refiner={}", "rollout.store=groups"], "rollout.store", "null"),
        (["prompts.refiner={}", "memory.text_encoders=free"], "memory.text_encoders", "keep"),
        (["prompts.refiner={}", "memory.prompt_cache=a"], "memory.prompt_cache", "null"),
        (["prompts.refiner={own_words: 99}"], "prompts.refiner.own_words", "2"),
        (["prompts.refiner={}", "rollout.tree={kind: branch_grpo}"], "rollout.tree",
         "{kind: flow_grpo}"),
        (["rollout.group_size=1", "prompts.book={}"], "objective.advantage.center", "tracker"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused_by_name(overrides, key, value):
    with pytest.raises(UserError, match=key) as caught:
        parse(*overrides)
    assert "\n" not in str(caught.value)
    parse(*overrides, f"{key}={value}")

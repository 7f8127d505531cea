"""Options: what is refused by name, alone and together, where the suggestion works."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from flowrl.config import Config, parse_config
from flowrl.config.explain import default_text, explain
from flowrl.config.load import merge, parse_overrides
from flowrl.config.messages import walk
from flowrl.config.objectives import Objective
from flowrl.config.rewards import (
    RewardOptions,
    check_rewards,
)
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError
from flowrl.trees.presets import PRESETS

PACKAGE = Path(__file__).parents[2] / "flowrl"
SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}
FAST = "rollout.tree={kind: flow_grpo_fast, window: %s}"
LONG = "rollout.num_inference_steps=1000"


def parse(*overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        # The nearest option is suggested, wherever it is.
        ("optim.lrr=1", "optim.lrr optim.lr?"),
        ("rollout.lr=1", "rollout.lr: optim.lr?"),
        ("rewards.0.wieght=1", "rewards.0.wieght rewards.0.weight?"),
        ("rollout.tree={kind: branch_grpo, split: [0]}", "rollout.tree.split: splits?"),
        ("rollout.tree={kind: branch_grp}", "rollout.tree.kind branch_grpo?"),
        (FAST % "{kind: random, size: 2, sise: 2}", "window.sise rollout.tree.window.size?"),
        ("qqqq=1", "qqqq pipeline runtime."),
        # Options of one kind beside another kind.
        ("objective.noising.count=2", "objective.noising nft"),
        ("rollout.tree={splits: [0]}", "rollout.tree.kind"),
        # Values of another type, and limits.
        ("optim.lr=fast", "optim.lr 'fast'"),
        ("optim.lr=0", "optim.lr greater 0."),
        ("optim.lr=.inf", "optim.lr finite"),
        ("run.trackers=[tb]", "run.trackers.0 'tensorboard' 'wandb'"),
        ("prompts.train=", "prompts.train"),
        ("rollout.num_inference_steps=1001", "rollout.num_inference_steps 1000"),
        ("run.seed=18446744073709551616", "run.seed"),
        ("run.output_dir=2026", "run.output_dir string"),
        # Items of lists.
        ("rewards=[{weight: 1}]", "rewards.0.name"),
        ("rewards.4.weight=2", "rewards"),
        # Options of rewards.
        ("rewards.0.executor={urls: [x]}", "rewards.0.executor.kind missing"),
        ("rewards.0.executor={kind: inline, urls: [x]}", "executor.urls http"),
        ("rewards.0.executor={kind: http, urls: []}", "rewards.0.executor urls"),
        ("rewards.0.executor={kind: http, urls: ['localhost:8000']}", "'localhost:8000' urls"),
        ("rewards.0.applies_to={tag: []}", "applies_to at least 1"),
        ("rewards.0={args: {a: 1}, executor: {kind: http, urls: ['http://host']}}", "args server"),
        # Trees too large to list.
        (f"{LONG} rollout.tree={{kind: tempflow, branch: 2}}", "rollout"),
    ],
)
def test_a_wrong_option_is_named_in_one_sentence(overrides, named):
    words = overrides.split(" ", 1) if overrides.startswith(LONG) else [overrides]
    with pytest.raises(UserError) as caught:
        parse(*words)
    sentence = str(caught.value)
    assert all(name in sentence for name in named.split()), sentence
    assert "\n" not in sentence and len(sentence) < 500 and sentence.isprintable()


def test_several_mistakes_are_shown_at_once_but_not_thousands():
    for count, lines in ((2, 2), (3000, 9)):  # the last says how many more there are
        with pytest.raises(UserError) as caught:
            parse_config(SMALLEST | {f"x{i}": 1 for i in range(count)})
        assert len(str(caught.value).splitlines()) == lines


def test_every_option_is_read_by_some_module():
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.arg for node in nodes if isinstance(node, ast.arg)}  # by `arguments()`
    names = {option.path.rpartition(".")[2] for option in walk(Config)} - {"kind"}
    assert not names - read


def test_a_kind_of_objective_or_tree_is_named_in_its_options_alone():
    """So that a new one is its file and its options, and no table elsewhere knows it."""
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    kinds |= PRESETS.keys()
    kinds -= {"custom", "grpo", "ode", "dpo", "kto"}  # defaults; votes are learned by the last two
    assert len(kinds) > 25
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name + "/" + path.name in ("config/objectives.py", "trees/presets.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.Constant) and node.value in kinds), (path, node.value)


def test_every_option_has_a_meaning_and_a_default_that_a_recipe_takes():
    options = list(walk(Config))
    assert all(option.meaning.strip() for option in options)
    assert len(explain().splitlines()) == len(Config.model_fields)
    for option in options:
        assert option.required or load_yaml(default_text(option)) is not ...
    for path in sorted({option.path for option in options})[::20]:  # each takes time
        assert path in explain(path) or path.replace(".0", "") in explain(path)


def test_one_reward_is_trained_on():
    check_rewards([RewardOptions(name="ocr"), RewardOptions(name="ocr", args={"mode": "strict"})])
    with pytest.raises(ValueError, match="nothing to train on"):
        check_rewards([RewardOptions(name="ocr", held_out=True)])


def test_a_gate_is_of_a_trained_reward_beside_one_that_has_none():
    pair = "rewards=[{name: ocr}, {name: brightness, gate: {reward: ocr, above: 0.5}}]"
    gate = parse(pair).rewards[1].gate
    assert gate is not None and (gate.reward, gate.above) == ("ocr", 0.5)
    wrong = "gate: {reward: ocr, above: 0.5}"
    for overrides, sentence in [
        ([f"rewards=[{{name: ocr}}, {{name: brightness, weight: -1, {wrong}}}]"], "weight above 0"),
        ([f"rewards=[{{name: ocr}}, {{name: brightness, held_out: true, {wrong}}}]"], "held_out"),
        ([f"rewards=[{{name: brightness, {wrong}}}]"], "has no gate"),
        ([pair, "objective.advantage.rewards=gdpo"], "advantage.rewards must be sum"),
    ]:
        with pytest.raises(UserError, match=sentence):
            parse(*overrides)


# --- rules between sections ----------------------------------------------------------------------

STEPS = "rollout.num_inference_steps"
TREE = "rollout.tree={kind: branch_grpo, %s}"
PRUNED = "rollout.depth_pruning={%s}"


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


def test_every_iteration_has_its_own_plan_where_not_all_have_one():
    fixed, pruned = FAST % "{kind: fixed, size: 4}", PRUNED % "start: 1, size: 1, period: 5"
    moving, grown = FAST % "{kind: progressive, period: 5}", "rollout.tree={kind: b2_diffurl, %s}"
    cases = ([fixed], 1), ([fixed, pruned], 4), ([moving], 4), ([grown % "branch: 4"], 3)
    for overrides, plans in cases:
        rollout = parse(*overrides).rollout
        made, each = [rollout.plan(i, seed=3) for i in range(100)], rollout.plans(seed=3)
        assert len(set(made)) == plans
        assert each == made[0] if plans == 1 else [each(i) for i in range(100)] == made


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

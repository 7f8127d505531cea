"""Options: what is read, what is refused by name, and that each is used."""

import ast
from pathlib import Path

import pytest

from flowrl.config import Config, parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.config.messages import walk
from flowrl.config.rewards import (
    RewardOptions,
    check_rewards,
)
from flowrl.errors import UserError

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
    with pytest.raises(UserError) as caught:
        parse("optim.lrr=1", "lora.rank=-1")
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UserError, match="prompts(.|\n)*rewards"):
        parse_config({})
    with pytest.raises(UserError) as caught:
        parse_config(SMALLEST | {f"x{i}": 1 for i in range(3000)})
    assert len(str(caught.value).splitlines()) == 9  # the last says how many more there are


def test_every_option_is_read_by_some_module():
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.arg for node in nodes if isinstance(node, ast.arg)}  # by `arguments()`
    names = {option.path.rpartition(".")[2] for option in walk(Config)} - {"kind"}
    assert not names - read


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

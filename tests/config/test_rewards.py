"""The options of rewards, as a recipe gives them."""

import pytest

from flowrl.config import parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.config.rewards import RewardOptions as Section
from flowrl.config.rewards import (
    check_rewards,
)
from flowrl.errors import UserError

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}


def parse(*overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


def test_wrong_options_of_rewards_are_named():
    for override, sentence in [
        ("executor={kind: inlin}", "executor.kind is 'inlin': .*; did you mean inline?"),
        ("executor={urls: [x]}", "Option rewards.0.executor.kind is missing"),
        ("executor={kind: inline, urls: [x]}", "executor.urls is of the kind http"),
        (
            "executor={kind: http, urls: ['http://127.0.0.1'], url: x}",
            "rewards.0.executor.url: .*executor.urls?",
        ),
        ("executor={kind: http}", "Option rewards.0.executor.urls is missing"),
        ("executor={kind: http, urls: []}", "rewards.0.executor: urls is empty"),
        (
            "executor={kind: http, urls: ['localhost:8000']}",
            "'localhost:8000' in urls is no address",
        ),
        (
            "executor={kind: http, urls: ['http://127.0.0.1'], timeout: 200}",
            "timeout is 200 and deadline 120, but a request",
        ),
        ("executor={kind: inline, micro_batch: 0}", "executor.micro_batch is 0: expected greater"),
        ("applies_to={tag: ocr}", "rewards.0.applies_to is 'ocr': expected a valid list"),
        ("applies_to={tag: []}", "applies_to.tag is an empty list, which no prompt matches"),
    ]:
        with pytest.raises(UserError, match=sentence.replace("?", r"\?")) as caught:
            parse(f"rewards.0.{override}")
        assert "\n" not in str(caught.value)
    remote = "rewards=[{name: x, args: {a: 1}, executor: {kind: http, urls: ['http://127.0.0.1']}}]"
    with pytest.raises(UserError, match="the server makes the reward: give them to the server"):
        parse(remote)
    check_rewards([Section(name="ocr"), Section(name="ocr", args={"mode": "strict"})])
    with pytest.raises(ValueError, match="rewards.1 is 'ocr' with the same args"):
        check_rewards([Section(name="ocr"), Section(name="ocr", weight=2.0)])
    with pytest.raises(ValueError, match="nothing to train on"):
        check_rewards([Section(name="ocr", held_out=True)])


def test_a_gate_is_of_a_trained_reward_beside_one_that_has_none():
    pair = "rewards=[{name: ocr}, {name: brightness, gate: {reward: ocr, above: 0.5}}]"
    gate = parse(pair).rewards[1].gate
    assert gate is not None and (gate.reward, gate.above, gate.softness) == ("ocr", 0.5, 0.0)
    wrong = "gate: {reward: ocr, above: 0.5}"
    for overrides, sentence in [
        ([f"rewards=[{{name: ocr}}, {{name: brightness, weight: -1, {wrong}}}]"], "weight above 0"),
        ([f"rewards=[{{name: ocr}}, {{name: brightness, held_out: true, {wrong}}}]"], "held_out"),
        ([f"rewards=[{{name: brightness, {wrong}}}]"], "has no gate"),
        ([pair, "objective.advantage.rewards=gdpo"], "set it to sum, or remove the gate"),
    ]:
        with pytest.raises(UserError, match=sentence):
            parse(*overrides)

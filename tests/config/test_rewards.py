"""The options of rewards, as a recipe gives them."""

import pytest

from flowrl.config import config_yaml, parse_config
from flowrl.config.explain import explain
from flowrl.config.load import merge, parse_overrides
from flowrl.config.rewards import (
    FailureOptions,
    HTTPOptions,
    InlineOptions,
    check_rewards,
)
from flowrl.config.rewards import RewardOptions as Section
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError

SMALLEST = {"prompts": {"train": "prompts.txt"}, "rewards": [{"name": "ocr"}]}


def parse(*overrides):
    return parse_config(merge(SMALLEST, parse_overrides(overrides)))


def test_options_of_rewards_read_back():
    reward = parse().rewards[0]
    assert reward.executor == InlineOptions()
    assert reward.applies_to == {}
    assert parse().failures == FailureOptions(max_invalid_fraction=0.1)
    config = parse_config(SMALLEST | {"rewards": WHOLE, "failures": {"max_invalid_fraction": 0.3}})
    assert parse_config(load_yaml(config_yaml(config))) == config
    first, *_, last = config.rewards
    assert isinstance(first.executor, InlineOptions) and first.executor.micro_batch == 2
    assert isinstance(last.executor, HTTPOptions)
    assert first.applies_to["tag"] == ["ocr", 3, True]
    for option in ["applies_to", "executor", "executor.urls"]:
        assert explain(f"rewards.0.{option}")


WHOLE = [
    {
        "name": "ocr",
        "applies_to": {"tag": ["ocr", 3, True]},
        "executor": {"kind": "inline", "micro_batch": 2},
    },
    {"name": "c:d", "args": {"x": 1}},
    {
        "name": "e",
        "executor": {"kind": "http", "urls": ["http://127.0.0.1:8000"]},
    },
]


def test_wrong_options_of_rewards_are_named():
    for override, sentence in [
        ("executor={kind: inlin}", "executor.kind is 'inlin': .*; did you mean inline?"),
        ("executor={urls: [x]}", "Option rewards.0.executor.kind is missing"),
        ("executor={kind: inline, urls: [x]}", "executor.urls belongs to .*kind http"),
        ("executor={kind: http, url: x}", "rewards.0.executor.url: .*executor.urls?"),
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
        ("executor={kind: inline, micro_batch: 0}", "executor.micro_batch is 0: expected a number"),
        ("applies_to={tag: ocr}", "rewards.0.applies_to is 'ocr': expected a list"),
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

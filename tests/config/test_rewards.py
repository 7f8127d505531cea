"""The options of rewards, as a recipe gives them."""

import pytest

from flowrl.config import config_yaml, parse_config
from flowrl.config.explain import explain
from flowrl.config.load import merge, parse_overrides
from flowrl.config.rewards import (
    FailureOptions,
    HTTPOptions,
    InlineOptions,
    RankOptions,
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
    assert reward.executor == InlineOptions() and reward.transform is None
    assert (reward.applies_to, reward.on_failure) == ({}, "mask")
    assert parse().failures == FailureOptions(max_invalid_fraction=0.1)
    config = parse_config(SMALLEST | {"rewards": WHOLE, "failures": {"max_invalid_fraction": 0.3}})
    assert parse_config(load_yaml(config_yaml(config))) == config
    first, *_, last = config.rewards
    assert isinstance(first.executor, InlineOptions) and first.executor.micro_batch == 2
    assert isinstance(last.executor, HTTPOptions) and isinstance(last.transform, RankOptions)
    assert first.applies_to["tag"] == ["ocr", 3, True] and first.on_failure == -1.5
    assert parse("rewards.0.on_failure=0").rewards[0].on_failure == 0
    for option in ["transform", "transform.scale", "executor.urls", "on_failure"]:
        assert explain(f"rewards.0.{option}")


WHOLE = [
    {
        "name": "ocr",
        "transform": {"kind": "affine", "scale": 0.5, "shift": -1.0},
        "applies_to": {"tag": ["ocr", 3, True]},
        "on_failure": -1.5,
        "executor": {"kind": "inline", "micro_batch": 2},
    },
    {"name": "a:b", "transform": {"kind": "clip", "high": 2}, "on_failure": "raise"},
    {"name": "c:d", "transform": {"kind": "affine", "scale": 20}, "args": {"x": 1}},
    {
        "name": "e",
        "transform": {"kind": "rank"},
        "executor": {"kind": "http", "urls": ["http://127.0.0.1:8000"]},
    },
]


def test_wrong_options_of_rewards_are_named():
    for override, sentence in [
        ("transform={kind: affin}", "transform.kind is 'affin': .*; did you mean affine?"),
        ("transform={scale: 2}", "Option rewards.0.transform.kind is missing"),
        ("transform={kind: affine, scale: 0}", "rewards.0.transform: scale is 0, which makes all"),
        ("transform={kind: clip}", "rewards.0.transform: neither low nor high is set"),
        ("transform={kind: clip, low: 2, high: 1}", "low is 2 and high 1, expected low < high"),
        ("transform={kind: rank, scale: 1}", "transform.scale belongs to .*kind affine"),
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
        ("on_failure=ignore", "on_failure is 'ignore': expected 'mask' or 'raise' or a number"),
        ("on_failure=true", "rewards.0.on_failure.*expected"),
        ("on_failure=.nan", "rewards.0.on_failure is nan: expected .*finite"),
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

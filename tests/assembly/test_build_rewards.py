"""From the recipe's rewards to rewards that can be asked."""

import pytest

from flowrl.assembly.learner import build_rewards
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.spec import RewardSpec


class Rivals:
    """Compares whole groups."""

    name = "rivals"
    scope = "group"

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, images, prompts, metadata):
        return [self.factor] * len(images)


def config(*rewards):
    return parse_config({"prompts": {"train": "p.txt"}, "rewards": [*rewards]})


def build(**entry) -> RewardSpec:
    return build_rewards(config({"name": "brightness"} | entry))[0]


def test_rewards_that_compare_groups_are_never_asked_in_parts():
    inline = {"kind": "inline", "micro_batch": 4}
    spec = build(name=f"{__name__}:Rivals", args={"factor": 3.0}, executor=inline)
    assert spec.name == "rivals" and spec.whole_groups
    assert isinstance(spec.executor, InlineExecutor) and spec.executor.options.micro_batch is None


REMOTE = {"kind": "http", "urls": ["http://127.0.0.1:1"], "token_env": "REWARD_TOKEN"}


def test_a_server_is_reward_and_executor_and_gets_the_token_of_the_environment(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    spec = build(name="far", executor=REMOTE | {"deadline": 60})
    assert isinstance(spec.executor, HTTPExecutor) and spec.executor is spec.reward
    assert spec.name == "far" and spec.executor.options.deadline == 60


def test_two_rewards_of_one_name_are_refused():
    strict = {"name": "geneval", "args": {"mode": "strict"}}
    same = {"name": "geneval", "args": {"mode": "strict", "colors": None}}
    with pytest.raises(UserError, match="two rewards are called 'geneval_strict'"):
        build_rewards(config(strict, same))
    own = build_rewards(config(strict, same | {"label": "published"}))
    assert [spec.name for spec in own] == ["geneval_strict", "published"]
    near = {"name": "far", "executor": REMOTE | {"token_env": None}}
    specs = build_rewards(config(near, near | {"label": "second"}))
    assert [spec.name for spec in specs] == ["far", "second"]


def test_a_missing_token_is_refused(monkeypatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    for _ in ("none", "an empty one"):
        with pytest.raises(UserError, match="token_env.*REWARD_TOKEN"):
            build_rewards(config({"name": "ocr"}, {"name": "far", "executor": REMOTE}))
        monkeypatch.setenv("REWARD_TOKEN", "")

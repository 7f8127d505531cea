"""From the recipe's rewards to rewards that can be asked."""

import functools
import inspect

import pytest
import torch

from flowrl.assembly.learner import build_rewards
from flowrl.config import parse_config
from flowrl.config.rewards import PoolOptions
from flowrl.errors import UserError
from flowrl.scoring.combine import rank
from flowrl.scoring.executors import pool
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.spec import RewardSpec

SCORES, GROUP = torch.tensor([-4.0, 0.0, 4.0]), torch.zeros(3).long()


class Rivals:
    """Compares whole groups."""

    name = "rivals"
    scope = "group"

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, images, prompts, metadata):
        return [self.factor] * len(images)


def config(*rewards, **failures):
    return parse_config(
        {"prompts": {"train": "p.txt"}, "rewards": [*rewards], "failures": failures}
    )


def build(**entry) -> RewardSpec:
    return build_rewards(config({"name": "brightness"} | entry))[0]


def test_a_plain_entry_is_a_reward_of_that_name_computed_here():
    spec = build(weight=-2.0)
    assert (spec.name, spec.weight, spec.held_out) == ("brightness", -2.0, False)
    assert isinstance(spec.executor, InlineExecutor) and spec.executor.reward is spec.reward
    assert spec.executor.options.micro_batch is None and spec.transform is None
    assert spec.on_failure == "mask" and dict(spec.applies_to) == {}


def test_transforms_do_what_their_options_say():
    for section, expected in [
        ({"kind": "affine", "scale": 0.5, "shift": 1}, [-1.0, 1.0, 3.0]),
        ({"kind": "clip", "low": -1, "high": 2}, [-1.0, 0.0, 2.0]),
        ({"kind": "sigmoid", "center": 4, "scale": 2}, [0.01798621, 0.11920292, 0.5]),
        ({"kind": "rank"}, [0.0, 0.5, 1.0]),
    ]:
        transform = build(transform=section).transform
        assert transform is not None
        assert transform(SCORES, GROUP).tolist() == pytest.approx(expected)
        assert (transform is rank) == (section["kind"] == "rank")


def test_what_else_an_entry_says_reaches_the_reward():
    spec = build(
        applies_to={"tag": ["ocr", "colors"]},
        on_failure=0.5,
        held_out=False,
        executor={"kind": "inline", "micro_batch": 4, "background": True},
    )
    assert spec.applies("p", {"tag": "ocr"}) and not spec.applies("p", {"tag": "counting"})
    assert spec.on_failure == 0.5
    assert isinstance(spec.executor, InlineExecutor) and spec.executor.options.micro_batch == 4
    images = torch.rand(6, 3, 4, 4)
    answer = spec.executor.submit(images, ["p"] * 6, [{}] * 6).result(10)
    spec.executor.close()
    torch.testing.assert_close(answer.scores, spec.reward(images, ["p"] * 6, [{}] * 6).float())


def test_rewards_that_compare_groups_are_never_asked_in_parts():
    inline = {"kind": "inline", "micro_batch": 4}
    spec = build(name=f"{__name__}:Rivals", args={"factor": 3.0}, executor=inline)
    assert spec.name == "rivals" and spec.whole_groups
    assert isinstance(spec.executor, InlineExecutor) and spec.executor.options.micro_batch is None


class Recorded:
    """Keeps how it was made, in place of an executor that starts processes or asks a network."""

    def __init__(self, *args, **options):
        self.args, self.options, self.closed = args, options, False

    def close(self):
        self.closed = True

    def __call__(self, images, prompts, metadata):
        raise AssertionError

    def submit(self, images, prompts, metadata):
        raise AssertionError


@pytest.fixture
def made(monkeypatch):
    found: list[Recorded] = []

    def record(real, *args, **options):
        inspect.signature(real).bind(*args, **options)
        found.append(Recorded(*args, **options))
        return found[-1]

    monkeypatch.setattr(pool, "PoolExecutor", functools.partial(record, pool.PoolExecutor))
    return found


def test_a_pool_gets_the_rewards_import_path_and_its_options(made):
    how = {"kind": "pool", "workers": 3, "timeout": 5, "micro_batch": 2, "max_tasks": 50}
    spec = build(name="geneval", args={"mode": "strict"}, executor=how)
    first = made[0]
    assert spec.executor is first and spec.name == "geneval_strict"
    assert first.args[:3] == ("geneval", {"mode": "strict"}, "geneval_strict")
    assert first.args[3] == PoolOptions(workers=3, timeout=5.0, micro_batch=2, max_tasks=50)
    build(name=f"{__name__}:Rivals", executor=how)
    assert made[1].args[:3] == (f"{__name__}:Rivals", {}, "rivals")
    assert made[1].args[3].micro_batch is None


REMOTE = {"kind": "http", "urls": ["http://127.0.0.1:1"], "token_env": "REWARD_TOKEN"}


def test_a_server_is_reward_and_executor_and_gets_the_token_of_the_environment(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    spec = build(name="far", executor=REMOTE | {"deadline": 60})
    assert isinstance(spec.executor, HTTPExecutor) and spec.executor is spec.reward
    assert spec.name == "far" and spec.executor.options.deadline == 60


def test_a_token_that_is_not_there_is_asked_for_and_what_was_begun_ends(made, monkeypatch):
    for value in [None, ""]:
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
        if value is not None:
            monkeypatch.setenv("REWARD_TOKEN", value)
        pooled = {"name": "ocr", "executor": {"kind": "pool"}}
        with pytest.raises(UserError, match="token_env is 'REWARD_TOKEN'"):
            build_rewards(config(pooled, {"name": "far", "executor": REMOTE}))
        assert made.pop().closed and not made


def test_two_rewards_of_one_name_are_refused():
    strict = {"name": "geneval", "args": {"mode": "strict"}}
    same = {"name": "geneval", "args": {"mode": "strict", "colors": "pixels"}}
    with pytest.raises(UserError, match="two rewards are called 'geneval_strict'"):
        build_rewards(config(strict, same))
    own = build_rewards(config(strict, same | {"label": "published"}))
    assert [spec.name for spec in own] == ["geneval_strict", "published"]
    near = {"name": "far", "executor": REMOTE | {"token_env": None}}
    specs = build_rewards(config(near, near | {"label": "second"}))
    assert [spec.name for spec in specs] == ["far", "second"]


def test_the_callers_rewards_and_the_recipes_limits_of_failures_are_taken():
    own = Rivals()
    specs = build_rewards(config({"name": "no.such:Thing"}), {"mine": own})
    assert [(s.name, s.reward, s.weight) for s in specs] == [("mine", own, 1.0)]
    limit = config({"name": "ocr"}, max_invalid_fraction=0.3, max_streak=2).failures.build()
    assert (limit.max_invalid_fraction, limit.max_streak) == (0.3, 2)

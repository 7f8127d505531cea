"""What is built of a recipe: options arrive, and what cannot work is refused before it starts."""

import logging

import pytest
import torch

from flowrl.assembly.backbone import build_backbone
from flowrl.assembly.learner import ProvidedObjects, build_learner, build_rewards
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.distributed import Runtime


def test_what_cannot_work_is_refused(make_learner, tiny_config, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("a cat\n")
    mine = {"prompts": str(tmp_path / "mine.txt")}
    for change, name in (
        ({"specs": [{"name": "geneval"}], "evaluation": mine}, "evaluation.prompts"),
        ({"run": {"on_hacking": {"held_out": "brightness"}}}, "held_out: true"),
        ({"objective": {"kl_coef": 0.1, "kl_on": {"reward": "quality"}}}, "objective.kl_on.reward"),
    ):
        evaluation = {"prompts": "tiny:colors:test", "every": 1} | change.get("evaluation", {})
        with pytest.raises(UserError) as error:
            make_learner(**change | {"evaluation": evaluation})
        assert name in str(error.value), change
    monkeypatch.setattr(Runtime, "world_size", 9)
    monkeypatch.setattr("flowrl.utils.distributed._peers", lambda *_: None)  # there are no others
    with pytest.raises(UserError, match="8 trees cannot be shared among 9 processes"):
        make_learner()
    kind = type("StableDiffusionXLPipeline", (), {"__module__": "diffusers.pipelines.xl"})
    with pytest.raises(UserError, match="StableDiffusionXLPipeline"):
        build_backbone(tiny_config().pipeline, kind(), guidance=1.0)


def test_the_velocity_is_compared_once_and_nothing_random_moves(tiny_config, load_tiny, caplog):
    before = torch.random.get_rng_state()
    config = tiny_config(memory={"text_encoders": "free"})
    with caplog.at_level(logging.INFO, "flowrl"):
        build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))
    assert caplog.text.count("all 4 steps") == 1
    assert torch.equal(torch.random.get_rng_state(), before)


# --- rewards -------------------------------------------------------------------------------------


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

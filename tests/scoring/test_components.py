"""A reward with several named scores is asked once for all of them, wherever it runs."""

import math
from contextlib import closing

import pytest
import torch
from component_reward import Parts

from flowrl.assembly.learner import build_rewards
from flowrl.config import load_config
from flowrl.config.rewards import RewardOptions
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor, RewardFailure, read_answer
from flowrl.scoring.scorer import Scoring, score
from flowrl.scoring.server import make_app
from flowrl.scoring.spec import RewardSpec
from flowrl.scoring.spec import closing as closing_specs

IMAGES = torch.arange(4)[:, None, None, None].expand(4, 3, 8, 8) / 4
PROMPTS, METADATA = ["a", "b", "c", "d"], [{}, {}, {"broken": True}, {}]


def entries(name: str = "component_reward:Parts", **common) -> list[RewardOptions]:
    parts = ({}, {"component": "bright"}, {"component": "length", "held_out": True})
    return [RewardOptions.model_validate({"name": name, **common, **part}) for part in parts]


def specs_of(rewards: list[RewardOptions]) -> list[RewardSpec]:
    return build_rewards(load_config("quickstart").model_copy(update={"rewards": rewards}))


def assert_parts(specs: list[RewardSpec], images: torch.Tensor = IMAGES) -> None:
    result = score(specs, images, PROMPTS, METADATA)
    assert result.names == ("parts", "parts_bright", "parts_length")
    seen = images.mean((1, 2, 3))
    expected = torch.stack([1 - seen, seen, torch.ones(4)], 1)
    expected[2, :] = math.nan
    torch.testing.assert_close(result.scores, expected, atol=0.01, rtol=0, equal_nan=True)
    for name in result.names:
        assert "engine" in result.errors[name]


@pytest.mark.parametrize("executor", [{"kind": "inline", "micro_batch": 3},
                                      {"kind": "inline", "background": True}])  # fmt: skip
def test_components_in_this_process_are_one_call(executor):
    Parts.calls = 0
    with closing_specs(specs := specs_of(entries(executor=executor))):
        assert_parts(specs)
    assert Parts.calls == (2 if "micro_batch" in executor else 1)


def test_components_of_a_pool_and_of_a_server_are_those_of_this_process(serving):
    with closing_specs(specs := specs_of(entries(executor={"kind": "pool", "micro_batch": 2}))):
        assert specs[1].executor.source is specs[0].executor  # pyright: ignore
        assert_parts(specs)
    with serving(make_app({"parts": Parts()})) as url:
        asked = {"kind": "http", "urls": [url], "micro_batch": 2}
        with closing_specs(specs := specs_of(entries("parts", executor=asked))):
            assert specs[0].reward.components == ("dark", "bright", "length")  # pyright: ignore
            assert_parts(specs)


def test_a_component_that_is_not_there_is_named_with_those_that_are():
    for component, said in (("blue", "it has dark, bright, length"),):
        entry = RewardOptions(name="component_reward:Parts", component=component)
        with pytest.raises(UserError, match=said):
            specs_of([entry])
    for reward, said in ((lambda *_: {"a": [1.0] * 4}, "gave a"), (lambda *_: [1.0] * 4, "none")):
        spec = RewardSpec(name="r", reward=reward, component="b")
        with pytest.raises(RewardFailure, match=said):
            score([spec], IMAGES, PROMPTS, METADATA)


def test_a_failure_of_the_whole_is_one_of_each_component_and_a_part_may_fail_alone():
    def broken(images, prompts, metadata):
        raise RuntimeError("engine died")

    with closing(InlineExecutor(broken, "r")) as executor:
        answer = executor.submit(IMAGES, PROMPTS, METADATA).result()
    assert len(answer.component("any").reasons) == 4
    answer = read_answer({"a": [1.0, None], "b": [None, 2.0]}, 2)
    assert answer.reasons.keys() == {1} and answer.component("b").reasons.keys() == {0}
    assert answer.component("b").scores[1] == 2


def test_a_reward_is_asked_in_its_phase_alone_and_leaves_the_others_as_they_are():
    asked: list[str] = []

    def make(name: str):
        return lambda images, *_: asked.append(name) or [1.0] * len(images)

    specs = [
        RewardSpec(name=when, reward=make(when), when=when, held_out=True)  # pyright: ignore
        for when in ("rollout", "evaluation", "both")
    ]
    for phase, names in (("rollout", {"rollout", "both"}), ("evaluation", {"evaluation", "both"})):
        asked.clear()
        scoring = Scoring(specs=specs, phase=phase)  # pyright: ignore
        scoring.add(IMAGES, PROMPTS, METADATA)
        result = scoring.result()
        assert set(asked) == names
        fits = result.applicable.all(0).tolist()
        assert fits == [n in names for n in result.names]
        assert result.names == ("rollout", "evaluation", "both")
        assert result.scores.isfinite().any(0).tolist() == [n in names for n in result.names]


def test_what_is_learned_from_must_be_asked_in_rollouts():
    with pytest.raises(ValueError, match="when is evaluation, but 'ocr' is learned from"):
        RewardOptions(name="ocr", when="evaluation")
    assert RewardOptions(name="ocr", when="evaluation", held_out=True).when == "evaluation"

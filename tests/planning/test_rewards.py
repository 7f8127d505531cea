"""Where rewards lie, and what judges are asked in a whole run."""

import pytest

from flowrl.cli.plan import _rewards_json, _show_rewards
from flowrl.config import parse_config
from flowrl.planning.rewards import (
    CLIP_H,
    host_rewards_bytes,
    offloaded_bytes,
    reward_work,
    total_requests,
)
from flowrl.planning.work import count_work

HERE = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}
ROLLOUT = {"prompts_per_iteration": 3, "group_size": 4, "num_inference_steps": 2}
# 5 iterations; before the first, after the second and fourth, and after the last.
EVALUATION = {"prompts": "tiny:geneval:test", "num_images": 7, "every": 2}
IMAGES, EVALUATED = 5 * 3 * 4, 4 * 7


def planned(*rewards: dict, **changes):
    base = {
        "pipeline": {"path": "tiny-sd3"},
        "prompts": {"train": "tiny:geneval:train"},
        "rollout": ROLLOUT,
        "evaluation": EVALUATION,
        "rewards": [{"name": "brightness"}, *rewards],
        "run": {"iterations": 5},
    }
    config = parse_config(base | changes)
    return reward_work(config, count_work(config))[1:]


def judge(name: str = "vlm_judge", *, args: dict | None = None, **more) -> dict:
    return {"name": name, "args": {"server": HERE, **(args or {})}, "held_out": True} | more


@pytest.mark.parametrize(
    "when, expected",
    [("both", IMAGES + EVALUATED), ("rollout", IMAGES), ("evaluation", EVALUATED)],
)
def test_a_judge_is_asked_once_an_image_where_it_is_asked_at_all(when, expected):
    (found,) = planned(judge(when=when))
    assert found.requests == expected and found.place == "m at http://127.0.0.1:1/v1"


def test_other_judges_ask_as_often_as_they_say():
    twice, pairs, rivals, unknown = planned(
        judge(args={"rubric": "viescore"}, when="both"),
        judge("pairwise"),
        judge("pairwise", args={"rivals": 1, "both_orders": False}, label="few"),
        judge("vlm_questions"),
    )
    assert twice.requests == 2 * (IMAGES + EVALUATED)
    assert pairs.requests == 5 * 3 * 4 * 3  # evaluations have no groups
    assert rivals.requests == 5 * 3 * 4
    assert unknown.requests is None
    assert total_requests([twice, pairs, unknown]) == twice.requests + pairs.requests


def test_components_are_one_request_and_a_budget_is_kept_beside_it():
    limited = {"rubric": "viescore", "server": HERE | {"max_requests": 9}}
    whole, part = planned(
        judge(args=limited, when="both"),
        judge(args=limited, component="semantic", when="both"),
    )
    assert whole.requests == 2 * (IMAGES + EVALUATED) and whole.budget == 9
    assert part.requests == 0


def test_places_are_said():
    entries = [
        {"name": "pickscore", "executor": {"kind": "inline", "offload": True}},
        {"name": "clipscore", "executor": {"kind": "pool", "workers": 2, "gpus": [6, 7]}},
        {"name": "ocr", "executor": {"kind": "pool"}},
        {"name": "hpsv2", "executor": {"kind": "http", "urls": ["http://example.com:1"]}},
        {"name": "compressibility", "executor": {"kind": "inline", "background": True}},
    ]
    found = planned(*entries)
    assert [reward.place for reward in found] == [
        "training, GPU, on the CPU in between",
        "2 processes, GPU 6, 7",
        "1 process, CPU",
        "http://example.com:1",
        "a thread of training, CPU",
    ]
    assert found[0].bytes == 4 * CLIP_H.parameters and found[3].bytes == 0


def test_a_network_that_another_reward_keeps_is_not_offloaded():
    config = {"prompts": {"train": "p.txt"}, "evaluation": {"prompts": None}}
    moved = {"name": "pickscore", "executor": {"kind": "inline", "offload": True}}
    stays = {"name": "pickscore", "label": "stays"}
    alone, both = (
        offloaded_bytes(parse_config(config | {"rewards": rewards}).rewards)
        for rewards in ([moved], [moved, stays])
    )
    assert (alone, both) == (4 * CLIP_H.parameters, 0)


def test_the_machine_s_memory_holds_the_networks_that_wait_on_the_cpu():
    offloaded = {"kind": "inline", "offload": True}
    rewards = [
        {"name": "pickscore", "executor": offloaded},
        {"name": "pickscore", "label": "twin", "executor": offloaded},  # of the same network
        {"name": "pickscore", "label": "there", "args": {"device": "cpu"}, "executor": offloaded},
    ]
    config = {"prompts": {"train": "p.txt"}, "evaluation": {"prompts": None}}
    sizes = []
    for count in (0, 1, 2, 3):
        entries = parse_config(
            config | {"rewards": rewards[:count] or [{"name": "brightness"}]}
        ).rewards
        sizes.append(host_rewards_bytes(entries))
    assert sizes == [0, 4 * CLIP_H.parameters, 4 * CLIP_H.parameters, 8 * CLIP_H.parameters]


def test_the_command_says_what_judges_cost(capsys):
    asked = planned(
        judge(args={"server": HERE | {"max_requests": 9}}, when="both"), judge("vlm_questions")
    )
    _show_rewards(asked, 0.5)
    shown = capsys.readouterr().out
    assert "Judges are sent 88 requests at most, which costs 44.00 at 0.5 each" in shown
    assert "vlm_judge ends the run before, at max_requests: 9 requests" in shown
    assert "one a question" in shown
    found = _rewards_json(asked, 0.5)
    assert found["cost_of_judges"] == 44
    assert [reward["requests"] for reward in found["rewards"]] == [88, None]
    _show_rewards(planned({"name": "ocr"}), 0.5)
    assert "Judges" not in capsys.readouterr().out

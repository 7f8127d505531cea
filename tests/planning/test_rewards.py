"""What judges are asked in a whole run, and what rewards hold on a GPU."""

import pytest

from flowrl.config import parse_config
from flowrl.planning.rewards import (
    CLIP_H,
    host_rewards_bytes,
    judge_requests,
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
    return judge_requests(config, count_work(config))


def judge(name: str = "vlm_judge", *, args: dict | None = None, **more) -> dict:
    return {"name": name, "args": {"server": HERE, **(args or {})}, "held_out": True} | more


@pytest.mark.parametrize(
    "when, expected",
    [("both", IMAGES + EVALUATED), ("rollout", IMAGES), ("evaluation", EVALUATED)],
)
def test_a_judge_is_asked_once_an_image_where_it_is_asked_at_all(when, expected):
    assert planned(judge(when=when)) == {"vlm_judge": expected}


def test_other_judges_ask_as_often_as_they_say():
    requests = planned(
        judge(args={"rubric": "wise"}, when="both"),
        judge("pairwise"),
        judge("pairwise", args={"rivals": 1}, label="few"),
        judge("vlm_questions"),
    )
    plain, pairs, rivals, unknown = requests.values()
    assert plain == IMAGES + EVALUATED
    assert pairs == 5 * 3 * 4 * 3  # evaluations have no groups
    assert rivals == 2 * 5 * 3 * 4
    assert unknown is None


def test_the_machine_s_memory_holds_the_networks_of_rewards_on_the_cpu():
    rewards = [
        {"name": "pickscore", "args": {"device": "cpu"}},
        {"name": "pickscore", "label": "twin", "args": {"device": "cpu"}},  # of the same network
        {"name": "pickscore", "label": "there"},
    ]
    config = {"prompts": {"train": "p.txt"}, "evaluation": {"prompts": None}}
    entries = parse_config(config | {"rewards": rewards}).rewards
    assert host_rewards_bytes(entries) == 4 * CLIP_H.parameters

"""What a reward's answers may be, and what they mean for a run; each from a real server."""

import json

import pytest
import torch
from faulty import Faulty, ask, assert_missing, body, changed, endless, good, random_images, remote

from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.executors.http import HTTPExecutor


def as_text(content: dict) -> None:
    content["results"][0]["score"] = "0.5"


def scored(value):
    def change(content: dict) -> None:
        for result in content["results"]:
            result["score"] = value

    return change


def test_answers_that_make_no_sense_give_no_score_and_are_not_asked_for_again():
    for fault, words in (
        (body(b"\x80\x04K\x01."), "JSON"),
        (body(b'{"protocol": 1, "results": ['), "JSON"),
        (body(b"[]"), "JSON"),
        (endless, "JSON"),
        (changed(as_text), "JSON"),
        (changed(lambda content: content["results"].pop()), "2 results"),
        (changed(lambda content: content.update(results=content["results"] * 2)), "6 results"),
        (changed(lambda content: content["results"].reverse()), "other images"),
        (changed(lambda content: content.update(reward="another")), "other images"),
        (changed(lambda content: content.update(key="of another question")), "another question"),
    ):
        with Faulty(fault) as server:
            assert_missing(ask(remote(server)), server.url, words)
            assert len(server.asked) == 1, words


def test_null_and_what_is_not_finite_is_missing_and_the_server_named():
    for value in [None, float("nan"), float("inf"), float("-inf"), 1e300]:
        with Faulty(changed(scored(value))) as server:
            assert_missing(ask(remote(server)), f"no finite number (at {server.url})")


def test_a_missing_score_and_one_beside_an_error_keep_their_reason_and_cost_no_other():
    for score in (None, 0.0):

        def change(content: dict, score=score) -> None:
            content["results"][1].update(score=score, error="RuntimeError: no face")

        with Faulty(changed(change)) as server:
            result = ask(remote(server))
            assert result.valid[:, 0].tolist() == [True, False, True]
            assert f"no face (at {server.url}) (prompt 'prompt 1')" in result.errors["mean"]


def test_two_versions_stop_the_run_of_two_servers_or_of_one_in_the_middle():
    with Faulty(good) as old, Faulty(good, version="v2") as new:
        with pytest.raises(RewardFailure, match=r"'mean'.*'v[12]'"):
            ask(remote(old, new))
        reward = remote(old)
        assert reward(random_images(1), ["a"], [{}])[0].isfinite().all()
        old.version = "v2"
        with pytest.raises(RewardFailure, match=r"'v2'.*'v1'"):
            reward(random_images(1), ["a"], [{}])
        reward.close()


def test_what_a_server_does_not_have_or_json_cannot_hold_stops_the_run():
    for options, data, words in (
        ({"codec": "raw-zlib"}, {}, "raw-zlib.*png"),
        ({"name": "median"}, {}, "'median'.*mean"),
        ({}, {"x": torch.ones(1)}, "'mean'.*metadata"),
        ({}, {"x": float("nan")}, "'mean'.*metadata"),
    ):
        with Faulty(good) as server:
            asked = HTTPExecutor(
                **{"name": "mean", "urls": [server.url], "deadline": 1.0} | options
            )
            with pytest.raises(RewardFailure, match=words):
                asked(random_images(1), ["a"], [data])
            asked.close()


def test_the_question_is_the_one_of_the_documentation():
    with Faulty(good) as server:
        asked = remote(server)
        asked(random_images(1), ["a cat"], [{"tag": "x"}])
        asked.close()
    (question,) = server.asked
    (item,) = question.pop("items")
    assert json.dumps(item.pop("image")).startswith('"iVBOR')
    assert item == {"id": "0", "prompt": "a cat", "metadata": {"tag": "x"}}
    assert len(question.pop("key")) == 32
    assert question == {"protocol": 1, "reward": "mean", "codec": "png"}

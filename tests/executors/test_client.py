"""What a reward's answers may be, and what they mean for a run; each from a real server."""

import json

import pytest
import torch
from faulty import (
    Faulty,
    ask,
    assert_missing,
    body,
    changed,
    endless,
    good,
    pictures,
    remote,
)

from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.executors.http import HTTPExecutor


def shorter(content: dict) -> None:
    content["results"].pop()


def longer(content: dict) -> None:
    content["results"] *= 2


def swapped(content: dict) -> None:
    content["results"].reverse()


def as_text(content: dict) -> None:
    content["results"][0]["score"] = "0.5"


def nameless(content: dict) -> None:
    content["reward"] = "another"


def rekeyed(content: dict) -> None:
    content["key"] = "of another question"


def scored(value):
    def change(content: dict) -> None:
        for result in content["results"]:
            result["score"] = value

    return change


@pytest.mark.parametrize(
    "fault, words",
    [
        (body(b"\x80\x04K\x01."), ["no JSON of scores"]),
        (body(b'{"protocol": 1, "results": ['), ["no JSON of scores"]),
        (body(b"<html>"), ["no JSON of scores"]),
        (body(b"[]"), ["no JSON of scores"]),
        (endless, ["no JSON of scores"]),
        (changed(as_text), ["no JSON of scores"]),
        (changed(shorter), ["2 results for 3 pictures"]),
        (changed(longer), ["6 results for 3 pictures"]),
        (changed(swapped), ["other pictures"]),
        (changed(nameless), ["other pictures"]),
        (changed(rekeyed), ["another question"]),
    ],
    ids="pickle cut html list endless text short long swapped other rekeyed".split(),
)
def test_answers_that_make_no_sense_give_no_score_and_are_not_asked_for_again(fault, words):
    with Faulty(fault) as server:
        assert_missing(ask(remote(server)), server.url, "look at its log", *words)
        assert len(server.asked) == 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf"), 1e300])
def test_null_and_what_is_not_finite_is_missing_and_the_server_named(value):
    with Faulty(changed(scored(value))) as server:
        assert_missing(ask(remote(server)), f"no finite number (at {server.url})")


def test_a_missing_score_keeps_its_reason_and_costs_the_others_nothing():
    def change(content: dict) -> None:
        content["results"][1].update(score=None, error="RuntimeError: no face")

    with Faulty(changed(change)) as server:
        result = ask(remote(server))
        assert result.valid[:, 0].tolist() == [True, False, True]
        assert f"no face (at {server.url}) (prompt 'prompt 1')" in result.errors["mean"]


def test_a_server_that_writes_a_number_beside_its_error_has_failed():
    def change(content: dict) -> None:
        content["results"][0].update(score=0.0, error="no face")

    with Faulty(changed(change)) as server:
        result = ask(remote(server))
        assert result.valid[:, 0].tolist() == [False, True, True]
        assert f"no face (at {server.url})" in result.errors["mean"]


def test_servers_of_two_versions_stop_the_run():
    with Faulty(good) as old, Faulty(good, version="v2") as new:
        with pytest.raises(RewardFailure, match=r"'mean'.*'v[12]'.*do not compare"):
            ask(remote(old, new))


def test_a_version_that_changes_in_the_middle_stops_the_run():
    with Faulty(good) as server:
        reward = remote(server)
        assert reward(pictures(1), ["a"], [{}])[0].isfinite().all()
        server.version = "v2"
        with pytest.raises(RewardFailure, match=r"has version 'v2'.*had 'v1' in this run"):
            reward(pictures(1), ["a"], [{}])
        reward.close()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"codec": "raw-zlib"}, "does not take pictures as raw-zlib.*one of png"),
        ({"name": "median"}, "'median': .* does not serve it; it serves mean"),
    ],
)
def test_what_a_server_does_not_have_stops_the_run(options, words):
    with Faulty(good) as server:
        asked = HTTPExecutor(**{"name": "mean", "urls": [server.url], "deadline": 1.0} | options)
        with pytest.raises(RewardFailure, match=words):
            asked(pictures(1), ["a"], [{}])
        asked.close()


def test_metadata_that_json_cannot_hold_stop_the_run():
    with Faulty(good) as server:
        asked = remote(server)
        for value in (torch.ones(1), float("nan")):
            with pytest.raises(RewardFailure, match="'mean'.*metadata travel as JSON"):
                asked(pictures(1), ["a"], [{"x": value}])
        asked.close()


def test_the_question_is_the_one_of_the_documentation():
    with Faulty(good) as server:
        asked = remote(server)
        asked(pictures(1), ["a cat"], [{"tag": "x"}])
        asked.close()
    (question,) = server.asked
    (item,) = question.pop("items")
    assert json.dumps(item.pop("image")).startswith('"iVBOR')
    assert item == {"id": "0", "prompt": "a cat", "metadata": {"tag": "x"}}
    assert len(question.pop("key")) == 32
    assert question == {"protocol": 1, "reward": "mean", "codec": "png"}

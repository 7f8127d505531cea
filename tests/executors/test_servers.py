"""Servers that fail, rest, refuse and recover, each of them real."""

import time

import pytest
from faulty import (
    Faulty,
    ask,
    assert_missing,
    assert_right,
    drip,
    good,
    late,
    remote,
    status,
    truncated,
)

from flowrl.executors.base import RewardFailure

NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs


@pytest.mark.parametrize(
    "fault, words",
    [
        (status(500), ["answered 500 (engine died)", "deadline"]),
        (status(503, "loading"), ["answered 503 (loading)"]),
        (late(5), ["did not answer within 0.3 s"]),
        (drip, ["no score within 1 s"]),
        (truncated, ["broke off"]),
    ],
    ids=["500", "503", "slow", "drip", "truncated"],
)
def test_servers_that_stay_broken_cost_the_deadline_and_give_no_score(fault, words):
    with Faulty(fault) as server:
        assert_missing(
            ask(remote(server, timeout=0.3, deadline=1.0)), server.url, "look at its log", *words
        )


@pytest.mark.parametrize("fault", [status(500), late(0.6), truncated, status(408), status(429)])
def test_what_passes_is_tried_again_with_the_same_key(fault):
    with Faulty(fault, fault, good) as server:
        assert_right(ask(remote(server, timeout=0.3)))
        assert len(server.asked) == 3
        assert len({question["key"] for question in server.asked}) == 1


@pytest.mark.parametrize("code", [302, 400, 401, 403, 404, 413, 422, 424])
def test_refusals_stop_with_the_servers_sentence_and_are_not_tried_again(code):
    with Faulty(status(code, "the cat is missing")) as server:
        with pytest.raises(RewardFailure, match=r"'mean'.*the cat is missing") as caught:
            ask(remote(server))
        assert server.url in str(caught.value) and len(server.asked) == 1


def test_retry_after_is_waited_for():
    with Faulty(status(429, Retry_After="0.5"), good) as server:
        began = time.monotonic()
        assert_right(ask(remote(server)))
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("when", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_server_that_asks_for_more_time_than_there_is_ends_the_try_at_once(when):
    with Faulty(status(503, "tea", Retry_After=when)) as server:
        began = time.monotonic()
        assert_missing(ask(remote(server, deadline=30.0)), "asks to wait", "(tea)")
        assert time.monotonic() - began < 5.0


def test_a_server_with_a_busy_one_beside_it_scores_at_once():
    with Faulty(status(503, Retry_After="3600")) as busy, Faulty(good) as free:
        assert_right(ask(remote(busy, free, micro_batch=1), count=8))
        assert len(busy.asked) <= 4  # those in flight at first


def test_a_broken_server_is_left_alone_while_another_scores_everything():
    with Faulty(status(500)) as broken, Faulty(good) as sound:
        result = ask(remote(broken, sound, micro_batch=1, in_flight=1), count=20)
        assert_right(result)
        assert len(broken.asked) == 3  # in a row, and then it rests


def test_a_server_that_recovers_is_asked_for_its_health_before_it_is_used():
    with Faulty(status(500), status(500), status(500), good) as server:
        assert_right(ask(remote(server, timeout=0.3, in_flight=1)))
        assert server.probes == 1 and len(server.asked) == 4


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    with Faulty(good) as server:
        assert_right(ask(remote(server)))

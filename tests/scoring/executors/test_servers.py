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
    random_images,
    remote,
    status,
    strict,
    truncated,
)

from flowrl.scoring.executors.base import RewardFailure

NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs


def test_servers_that_stay_broken_cost_the_deadline_and_give_no_score():
    for fault, words in [
        (status(500), ["500 (engine died)"]),
        (status(503, "loading"), ["answered 503 (loading)"]),
        (late(5), ["did not answer within 0.3 s"]),
        (drip, ["no score within 1 s"]),
        (truncated, ["broke off"]),
    ]:
        with Faulty(fault) as server:
            assert_missing(
                ask(remote(server, timeout=0.3, deadline=1.0)),
                server.url,
                "look at its log",
                *words,
            )


def test_what_passes_is_tried_again_with_the_same_key():
    for fault in [status(500), late(0.6), truncated, status(408), status(429)]:
        with Faulty(fault, fault, good) as server:
            assert_right(ask(remote(server, timeout=0.3)))
            assert len(server.asked) == 3
            assert len({question["key"] for question in server.asked}) == 1


def test_refusals_stop_with_the_servers_sentence_and_are_not_tried_again():
    for code in [302, 400, 401, 403, 404, 413, 422, 424]:
        with Faulty(status(code, "the cat is missing")) as server:
            with pytest.raises(RewardFailure, match=r"'mean'.*the cat is missing") as caught:
                ask(remote(server))
            assert server.url in str(caught.value) and len(server.asked) == 1


def test_retry_after_is_waited_for():
    with Faulty(status(429, Retry_After="0.5"), good) as server:
        began = time.monotonic()
        assert_right(ask(remote(server)))
        assert time.monotonic() - began >= 0.5


def test_a_server_that_asks_for_more_time_than_there_is_ends_the_try_and_is_asked_by_the_next():
    for when in ("86400", "Fri, 31 Dec 2100 23:59:59 GMT"):
        with Faulty(status(503, "tea", Retry_After=when), good) as server:
            asked = remote(server, deadline=2.0)
            began = time.monotonic()
            scores, reasons = asked(random_images(1), ["a"], [{}])
            assert time.monotonic() - began < 1.0 and scores.isnan().all()
            assert "(tea)" in reasons[0]
            assert asked(random_images(1), ["a"], [{}])[0].isfinite().all()
            asked.close()


def test_nonsense_about_when_to_come_back_is_ignored():
    for when in ["inf", "1e400", "nan", "-5", "soon", "", "Fri, 31 Dec 0000 23:59:59 GMT"]:
        with Faulty(status(503, Retry_After=when), good) as server:
            assert_right(ask(remote(server, deadline=3.0)))


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


def test_a_server_that_comes_late_with_smaller_limits_gets_what_it_takes():
    """What is on its way when it appears is scored by the other."""
    for limits in [{"max_batch": 2}, {"max_body": 900}]:
        with Faulty(good) as large, Faulty(strict(**limits), served=limits) as small:
            small.absent = True
            asked = remote(large, small, micro_batch=8, in_flight=1)
            assert asked.version == "v1"
            small.absent = False
            for _ in range(3):
                scores, reasons = asked(random_images(16), ["a"] * 16, [{}] * 16)
                assert scores.isfinite().all(), reasons
            asked.close()
            assert large.asked and not small.refused


def test_a_server_that_returns_with_smaller_limits_is_looked_at_anew():
    for before in [[], [status(500)] * 3]:
        with Faulty(good) as large, Faulty(*before, strict(max_batch=2)) as small:
            asked = remote(large, small, micro_batch=1, in_flight=1, timeout=0.2)
            assert asked(random_images(8), ["a"] * 8, [{}] * 8)[0].isfinite().all()
            small.served = {"max_batch": 2}
            asked.micro_batch = 4
            time.sleep(0.3)  # its rest
            for _ in range(2):
                assert asked(random_images(8), ["a"] * 8, [{}] * 8)[0].isfinite().all()
            asked.close()
            assert small.refused <= 1 and len(small.asked) > small.refused + 3


def test_a_server_that_refuses_what_it_says_it_takes_stops_the_run():
    with Faulty(strict(max_batch=2)) as server:
        with pytest.raises(RewardFailure, match="too much.*lower executor.micro_batch"):
            ask(remote(server))
        assert server.refused == 1


def test_groups_go_to_the_server_that_takes_them_whole():
    with Faulty(good, scope="group", served={"max_batch": 8}) as large:
        with Faulty(strict(max_batch=2), scope="group", served={"max_batch": 2}) as small:
            asked = remote(small, large)
            assert asked(random_images(5), ["a"] * 5, [{}] * 5)[0].isfinite().all()
            with pytest.raises(RewardFailure, match="9 images must not be split.*8 at a time"):
                asked(random_images(9), ["a"] * 9, [{}] * 9)
            asked.close()
            assert not small.refused


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    with Faulty(good) as server:
        assert_right(ask(remote(server)))

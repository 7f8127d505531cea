"""What becomes of a run when its reward servers do wrong, each wrong done by a real server."""

import json
import threading
import time

import pytest
import torch
from faulty import (
    Faulty,
    ask,
    body,
    changed,
    drip,
    endless,
    good,
    late,
    pictures,
    remote,
    status,
    truncated,
)

from flowrl.errors import UserError
from flowrl.executors import remote as module
from flowrl.executors.base import RewardFailure
from flowrl.executors.remote import Remote

NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs


def assert_missing(result, *words: str) -> None:
    """All scores are missing, never 0, and the message names reward, sample and remedy."""
    assert result.scores.isnan().all() and not result.valid.any()
    (message,) = result.errors.values()
    for word in ("mean", "prompt 0", *words):
        assert word in message or word in result.errors, message


def assert_right(result) -> None:
    torch.testing.assert_close(result.scores[:, 0], pictures(len(result.scores)).mean((1, 2, 3)))
    assert not result.errors


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


def scored(value):
    def change(content: dict) -> None:
        for result in content["results"]:
            result["score"] = value

    return change


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
        assert_missing(ask(remote(server)), server.url, "look at its log", *words)


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
    ],
    ids="pickle cut html list endless text short long swapped other".split(),
)
def test_answers_that_make_no_sense_give_no_score_and_are_not_asked_for_again(fault, words):
    with Faulty(fault) as server:
        assert_missing(ask(remote(server, timeout=0.9)), server.url, "look at its log", *words)
        assert len(server.asked) == 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_null_and_what_is_not_finite_is_missing(value):
    with Faulty(changed(scored(value))) as server:
        assert_missing(ask(remote(server)), "no finite number")


def test_a_missing_score_keeps_its_reason_and_costs_the_others_nothing():
    def change(content: dict) -> None:
        content["results"][1].update(score=None, error="RuntimeError: no face")

    with Faulty(changed(change)) as server:
        result = ask(remote(server))
        assert result.valid[:, 0].tolist() == [True, False, True]
        assert f"no face (at {server.url}) (prompt 'prompt 1')" in result.errors["mean"]


@pytest.mark.parametrize("fault", [status(500), late(0.6), truncated, status(408), status(429)])
def test_what_passes_is_tried_again_with_the_same_key(fault):
    with Faulty(fault, fault, good) as server:
        assert_right(ask(remote(server, deadline=3.0)))
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
        assert_right(ask(remote(server, deadline=2.0)))
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("when", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_server_that_asks_for_more_time_than_there_is_ends_the_try_at_once(when):
    with Faulty(status(503, "tea", Retry_After=when)) as server:
        began = time.monotonic()
        assert_missing(ask(remote(server, deadline=30.0)), "asks to wait", "(tea)")
        assert time.monotonic() - began < 1.0


def test_a_server_with_a_busy_one_beside_it_scores_at_once():
    with Faulty(status(503, Retry_After="3600")) as busy, Faulty(good) as free:
        assert_right(ask(remote(busy, free, micro_batch=1), count=8))
        assert len(busy.asked) <= 4  # those in flight at first


def test_no_server_at_all_is_a_missing_score_for_a_batch_and_a_failure_for_the_set_up():
    asked = remote(NOWHERE)
    images = pictures(3)
    began = time.monotonic()
    scores, reasons = asked(images, ["a"] * 3, [{}] * 3)
    assert scores.isnan().all() and len(reasons) == 3
    assert f"{NOWHERE} cannot be reached" in reasons[2] and "see that a server runs" in reasons[2]
    with pytest.raises(RewardFailure, match=r"'mean': no score within 1 s.*cannot be reached"):
        _ = asked.required_metadata
    asked.close()
    assert time.monotonic() - began < 2 * (asked.deadline + 0.4)


def test_a_broken_server_is_left_alone_while_another_scores_everything():
    with Faulty(status(500)) as broken, Faulty(good) as sound:
        result = ask(
            remote(broken, sound, micro_batch=1, in_flight=1, timeout=5, deadline=5), count=20
        )
        assert_right(result)
        assert len(broken.asked) == 3  # in a row, and then it rests


def test_a_server_that_recovers_is_asked_for_its_health_before_it_is_used():
    with Faulty(status(500), status(500), status(500), good) as server:
        assert_right(ask(remote(server, deadline=3.0, in_flight=1)))
        assert server.probes == 1 and len(server.asked) == 4


def test_pictures_keep_their_order_and_requests_their_bounds():
    with Faulty(late(0.15), late(0.05), late(0.1), good) as server:
        assert_right(ask(remote(server, micro_batch=3, in_flight=2, deadline=3.0), count=20))
        assert sorted(len(question["items"]) for question in server.asked) == [2, *[3] * 6]
        assert server.most_at_once == 2


def test_the_deadline_counts_the_time_in_the_queue():
    with Faulty(late(0.25)) as server:
        result = ask(remote(server, micro_batch=1, in_flight=1), count=12)
        scored = int(result.valid.sum())
        assert 0 < scored < 12 and result.valid[:scored].all()


def test_the_reward_is_what_its_server_says_asked_once():
    says = {"bounds": [0, None], "required_metadata": ["tag"], "scope": "group"}
    with Faulty(good, version="mean-7", **says) as server:
        reward = remote(server, token="secret")
        assert (reward.version, reward.bounds, reward.scope) == ("mean-7", (0, None), "group")
        assert reward.required_metadata == ("tag",) and reward.deterministic
        assert reward.differentiable is False and reward.name == "mean"
        reward.close()
        assert server.tokens == {"Bearer secret"}


def test_groups_are_never_split():
    with Faulty(good, scope="group") as server:
        reward = remote(server, micro_batch=2)
        scores, _ = reward(pictures(5), ["a"] * 5, [{}] * 5)
        assert scores.isfinite().all()
        assert [len(question["items"]) for question in server.asked] == [5]
        with pytest.raises(RewardFailure, match="17 pictures must not be split.*--max-batch"):
            reward(pictures(17), ["a"] * 17, [{}] * 17)  # of 16 unless a server says otherwise
        reward.close()


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
        asked = Remote(**{"name": "mean", "urls": [server.url], "deadline": 1.0} | options)
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


def test_pictures_with_nan_are_not_sent():
    images = pictures(3)
    images[1, 0, 0, 0] = float("nan")
    with Faulty(good) as server:
        asked = remote(server)
        scores, reasons = asked(images, ["a"] * 3, [{}] * 3)
        asked.close()
        assert scores.isnan().all() and "NaN" in reasons[1] and not server.asked


@pytest.mark.parametrize("urls", [[], ["localhost:8400"], ["ftp://example.com"]])
def test_addresses_are_checked_before_anything_starts(urls):
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        Remote("mean", urls)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    with Faulty(good) as server:
        assert_right(ask(remote(server)))


def test_waiting_is_told(monkeypatch, caplog):
    monkeypatch.setattr(module, "HEARTBEAT", 0.1)
    with Faulty(late(0.28)) as server:
        assert_right(ask(remote(server, timeout=1.0)))
    assert "waiting for reward mean, 3 pending, oldest 0 s" in caplog.text


def test_all_threads_end_with_close_even_while_a_server_hangs():
    before = set(threading.enumerate())
    with Faulty(late(30)) as server:
        asked = remote(server, timeout=30.0, deadline=30.0)
        future = asked.submit(pictures(1), ["a"], [{}])
        while not server.asked:
            time.sleep(0.01)
        began = time.monotonic()
        asked.close()
        asked.close()
        assert time.monotonic() - began < 1.0 and future.cancelled()
        assert not {t for t in set(threading.enumerate()) - before if "mean" in t.name}
    assert set(threading.enumerate()) <= before


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

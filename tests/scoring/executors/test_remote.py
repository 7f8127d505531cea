"""A reward on servers, as a run sees it: in time, in order, within its bounds."""

import threading
import time

import pytest
from faulty import PATIENCE, Faulty, ask, assert_right, good, late, random_images, remote

from flowrl.errors import UserError
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.executors.http import HTTPExecutor

NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs


def test_no_server_at_all_is_a_missing_score_for_a_batch_and_a_failure_for_the_set_up():
    asked = remote(NOWHERE, deadline=1.0)
    images = random_images(3)
    began = time.monotonic()
    scores, reasons = asked(images, ["a"] * 3, [{}] * 3)
    assert scores.isnan().all() and len(reasons) == 3
    assert f"{NOWHERE} cannot be reached" in reasons[2] and "see that a server runs" in reasons[2]
    with pytest.raises(RewardFailure, match=r"'mean': no score within 1 s.*cannot be reached"):
        _ = asked.required_metadata
    asked.close()
    assert time.monotonic() - began < 2 * (asked.deadline + PATIENCE)


def test_images_keep_their_order_and_requests_their_bounds():
    with Faulty(late(0.15), late(0.05), late(0.1), good) as server:
        assert_right(ask(remote(server, micro_batch=3, in_flight=2), count=20))
        assert sorted(len(question["items"]) for question in server.asked) == [2, *[3] * 6]
        assert server.most_at_once == 2


def test_the_deadline_counts_the_time_in_the_queue():
    with Faulty(late(0.25)) as server:
        result = ask(remote(server, micro_batch=1, in_flight=1, deadline=1.0), count=12)
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


def test_groups_are_never_split_and_images_with_nan_are_not_sent():
    with Faulty(good, scope="group") as server:
        reward = remote(server, micro_batch=2)
        scores, _ = reward(random_images(5), ["a"] * 5, [{}] * 5)
        assert scores.isfinite().all()
        assert [len(question["items"]) for question in server.asked] == [5]
        with pytest.raises(RewardFailure, match="17 .*--max-batch"):
            reward(random_images(17), ["a"] * 17, [{}] * 17)  # of 16 unless a server says otherwise
        images = random_images(3)
        images[1, 0, 0, 0] = float("nan")
        scores, reasons = reward(images, ["a"] * 3, [{}] * 3)
        assert scores.isnan().all() and "NaN" in reasons[1] and len(server.asked) == 1
        reward.close()


def test_addresses_limits_and_tokens_that_cannot_be_are_refused_and_no_token_is_shown():
    for urls in ([], ["localhost:8400"], ["ftp://example.com"]):
        with pytest.raises(UserError, match="http://HOST:PORT"):
            HTTPExecutor("mean", urls)
    wrong = {"micro_batch": [0], "timeout": [0.0, float("nan")], "in_flight": [0]}
    wrong["deadline"] = [-1.0, float("inf")]
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(UserError, match=f"'mean': {name} is {value}"):
            HTTPExecutor("mean", [NOWHERE], **{name: value})
    for token in ("schlüssel", "two words", "line\n", "\x07"):
        with pytest.raises(UserError, match="'mean': its token") as caught:
            HTTPExecutor("mean", [NOWHERE], token=token)
        assert token not in str(caught.value)


def test_servers_that_were_silent_twice_cost_no_third_deadline_and_are_asked_again_later():
    with Faulty(late(30)) as server:
        asked = remote(server, timeout=0.2, deadline=0.6)
        asked.submit(random_images(1), ["a"], [{}]).result(PATIENCE)
        together = [asked.submit(random_images(1), ["a"], [{}]) for _ in range(3)]
        assert all("no score within 0.6 s" in f.result(PATIENCE).reasons[0] for f in together)
        began = time.monotonic()
        again = asked.submit(random_images(1), ["a"], [{}]).result(PATIENCE)
        assert time.monotonic() - began < 0.3 and again.scores.isnan().all()
        assert "not asked, since no server answered within 0.6 s" in again.reasons[0]
        server.faults = [good]
        time.sleep(0.7)
        assert asked.submit(random_images(1), ["a"], [{}]).result(PATIENCE).scores.isfinite().all()
        asked.close()


def test_all_threads_end_with_close_even_while_a_server_hangs():
    before = set(threading.enumerate())
    with Faulty(late(30)) as server:
        asked = remote(server, timeout=30.0, deadline=30.0)
        future = asked.submit(random_images(1), ["a"], [{}])
        while not server.asked:
            time.sleep(0.01)
        began = time.monotonic()
        asked.close()
        asked.close()
        assert time.monotonic() - began < 5.0 and future.cancelled()
        assert not {t for t in set(threading.enumerate()) - before if "mean" in t.name}
    assert set(threading.enumerate()) <= before

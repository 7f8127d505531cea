"""A reward on servers that fail, rest, lie and recover, each of them real."""

import base64
import io
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from chat_servers import Scripted
from PIL import Image

from flowrl.config.rewards import HTTPOptions
from flowrl.scoring.executors import http
from flowrl.scoring.executors.base import Answer, RewardFailure
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.scorer import quantise

NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs
PATIENCE = 1.0  # seconds after a deadline; an answer must be there
TRUNCATED = lambda server, _: server.truncated  # noqa: E731

Fault = Callable[["Faulty", dict], Any]  # the server and a request -> what `Scripted` says


class Faulty(Scripted):
    """Serves the reward "mean" and answers POSTs with `faults`, the last of them for ever.

    most_at_once: of requests; info: of the reward; limits: of the server.
    """

    def __init__(
        self, *faults: Fault, version: str = "v1", limits: dict | None = None, **info: Any
    ):
        self.limits, self.faults = limits or {}, list(faults)
        self.version, self.info = version, info
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        super().__init__(self.answer)
        self.url = self.url.removesuffix("/v1")

    def answer(self, request: dict) -> Any:
        if not request:
            reward = {"name": "mean", "version": self.version} | self.info
            return {"protocol": 1, "rewards": [reward]} | self.limits
        with self.lock:
            fault = self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return fault(self, request)
        finally:
            self.at_once -= 1


def changed(change: Callable[[dict], Any]) -> Fault:
    """Return the mean of each image, after `change`; NaN and infinity are sent as json has them."""

    def answer(server: Faulty, request: dict) -> dict:
        results = []
        for item in request["items"]:
            with Image.open(io.BytesIO(base64.b64decode(item["image"]))) as image:
                score = float(np.asarray(image, np.float32).mean() / 255)
            results.append({"id": item["id"], "score": score})
        head = {"protocol": 1, "reward": "mean", "version": server.version}
        content = head | {"key": request["key"], "results": results}
        change(content)
        return content

    return answer


good = changed(lambda content: None)


def status(code: int, error: str = "engine died", **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda *_: (code, named, {"error": error})


def late(seconds: float) -> Fault:
    return lambda server, request: server.ending.wait(seconds) or good(server, request)


def images_of(count: int) -> torch.Tensor:
    """(count, 3, 4, 5), the mean of each a little more than that of the one before."""
    return quantise(torch.linspace(0.1, 0.9, count)[:, None, None, None].expand(count, 3, 4, 5))


def remote(*servers: Faulty | str, **options: Any) -> HTTPExecutor:
    urls = [s if isinstance(s, str) else s.url for s in servers]
    return HTTPExecutor("mean", HTTPOptions(**{"urls": urls, "deadline": 6.0} | options))


def scored(executor: HTTPExecutor, count: int = 3, metadata: dict | None = None) -> Answer:
    """Score `count` images. Fails when the deadline was missed, or a reason is."""
    began = time.monotonic()
    answer = executor.submit(
        images_of(count), [f"prompt {i}" for i in range(count)], [metadata or {}] * count
    ).result()
    assert time.monotonic() - began < executor.options.deadline + PATIENCE
    assert set(answer.reasons) == set(answer.scores.isnan().nonzero().flatten().tolist())
    return answer


def assert_right(answer: Answer) -> None:
    torch.testing.assert_close(answer.scores, images_of(len(answer.scores)).mean((1, 2, 3)))


# --- what a run sees ------------------------------------------------------------------------------


def test_images_keep_their_order_and_requests_their_limits(monkeypatch):
    monkeypatch.setattr(http, "IN_FLIGHT", 2)
    with Faulty(late(0.15), late(0.05), late(0.1), good) as server:
        with closing(remote(server, micro_batch=3)) as executor:
            assert_right(scored(executor, 20))
        assert sorted(len(request["items"]) for request in server.asked) == [2, *[3] * 6]
        assert server.most_at_once == 2


def test_groups_are_never_split():
    with Faulty(good, scope="group") as server, closing(remote(server, micro_batch=2)) as executor:
        assert_right(scored(executor, 5))
        assert [len(request["items"]) for request in server.asked] == [5]
        with pytest.raises(RewardFailure, match="17 .*--max-body"):
            scored(executor, 17)  # of 16 unless a server says otherwise


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    with Faulty(good) as server, closing(remote(server)) as executor:
        assert_right(scored(executor))


def test_close_ends_all_threads_while_a_server_hangs():
    before = set(threading.enumerate())
    with Faulty(late(30)) as server:
        executor = remote(server, deadline=120.0)
        future = executor.submit(images_of(1), ["a"], [{}])
        while not server.asked:
            time.sleep(0.01)
        began = time.monotonic()
        executor.close()
        executor.close()
        assert time.monotonic() - began < 5.0 and future.cancelled()
    assert set(threading.enumerate()) <= before


# --- failures that may pass -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, words",
    [
        (status(500), "engine died"),
        (status(503, "loading"), "answered 503"),
        (late(5), "did not answer within 0.2 s"),
        (lambda server, _: server.drip, "no score within 0.8 s"),
        (TRUNCATED, "broke off"),
        (None, "cannot be reached"),
    ],
)
def test_a_server_that_stays_broken_costs_the_deadline_and_gives_reasons(fault, words):
    with Faulty(fault or good) as server:
        url = NOWHERE if fault is None else server.url
        with closing(remote(url, deadline=0.8)) as executor:
            for text in scored(executor).reasons.values():
                assert words in text and url in text and "executor.deadline" in text
            if fault is None:
                with pytest.raises(RewardFailure, match="'mean'.*cannot be reached"):
                    _ = executor.version


@pytest.mark.parametrize("fault", [status(500), late(1.5), TRUNCATED, status(408), status(429)])
def test_what_may_pass_is_retried_with_the_same_key(fault):
    with Faulty(fault, fault, good) as server, closing(remote(server, deadline=4.0)) as executor:
        assert_right(scored(executor))
        assert len(server.asked) == 3
        assert len({request["key"] for request in server.asked}) == 1


def test_retry_after_is_waited_for_within_the_deadline_and_capped(monkeypatch):
    with Faulty(status(429, Retry_After="1"), good) as server:
        with closing(remote(server)) as executor:
            began = time.monotonic()
            assert_right(scored(executor))
            assert time.monotonic() - began >= 1.0
    monkeypatch.setattr(http, "LONGEST_RETRY_AFTER_S", 1.5)
    with Faulty(status(503, "tea", Retry_After="86400"), good) as server:
        with closing(remote(server, deadline=1.0)) as executor:
            began = time.monotonic()
            (reason,) = scored(executor, 1).reasons.values()
            assert time.monotonic() - began < 0.9
            assert "tea" in reason and time.strftime("rests until %H:") in reason
            time.sleep(1.5)
            assert_right(scored(executor, 1))
    for when in ("inf", "1e400", "nan", "-5", "soon", "", "Fri, 31 Dec 2100 23:59:59 GMT"):
        with Faulty(status(503, Retry_After=when), good) as server:
            with closing(remote(server)) as executor:
                assert_right(scored(executor))


def test_a_server_that_fails_or_rests_leaves_the_work_to_another():
    for fault in (status(500), status(503, Retry_After="3600"), late(20)):
        with Faulty(fault) as broken, Faulty(good) as sound:
            with closing(remote(broken, sound, micro_batch=1, deadline=1.6)) as executor:
                assert_right(scored(executor, 20))
            assert len(broken.asked) <= 8


# --- failures that stay ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [302, 400, 401, 403, 404, 413, 422, 424])
def test_a_refusal_stops_the_run_with_the_servers_sentence_and_is_not_retried(code):
    with Faulty(status(code, "the cat is missing")) as server, closing(remote(server)) as executor:
        with pytest.raises(RewardFailure, match="'mean'.*the cat is missing") as caught:
            scored(executor)
        assert server.url in str(caught.value) and len(server.asked) == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda *_: b"[" * 100_000,
        changed(lambda content: content["results"][0].update(score="0.5")),
        changed(lambda content: content["results"].reverse()),
        changed(lambda content: content.update(reward="another")),
        changed(lambda content: content.update(key="of another request")),
        *(
            changed(lambda content, v=value: [r.update(score=v) for r in content["results"]])
            for value in (None, float("nan"), float("inf"), float("-inf"), 1e300)
        ),
    ],
)
def test_a_nonsensical_answer_is_a_missing_score_and_is_not_retried(fault):
    with Faulty(fault) as server, closing(remote(server)) as executor:
        answer = scored(executor)
        assert answer.scores.isnan().all() and len(server.asked) == 1
        assert all(server.url in text for text in answer.reasons.values())


@pytest.mark.parametrize("score", [None, 0.0])
def test_a_missing_score_keeps_its_reason_and_costs_no_other(score):
    def change(content: dict) -> None:
        content["results"][1].update(score=score, error="RuntimeError: no face")

    with Faulty(changed(change)) as server, closing(remote(server)) as executor:
        answer = scored(executor)
    assert answer.scores.isnan().tolist() == [False, True, False]
    assert answer.reasons == {1: f"RuntimeError: no face (at {server.url})"}


def test_two_versions_stop_the_run_of_two_servers_or_of_one_in_the_middle():
    with Faulty(good) as old, Faulty(good, version="v2") as new:
        with closing(remote(old, new, micro_batch=1)) as executor:
            with pytest.raises(RewardFailure, match="'v[12]'.*'v[12]'"):
                scored(executor, 8)
        with closing(remote(old)) as executor:
            scored(executor)
            old.version = "v2"
            with pytest.raises(RewardFailure, match="'v2'.*'v1'"):
                scored(executor)


def test_another_name_and_metadata_that_json_cannot_hold_stop_the_run():
    with Faulty(good) as server:
        with closing(HTTPExecutor("median", HTTPOptions(urls=[server.url]))) as executor:
            with pytest.raises(RewardFailure, match="'median'.*mean"):
                scored(executor)
        with closing(remote(server)) as executor:
            for value in (torch.ones(1), float("nan")):
                with pytest.raises(RewardFailure, match="metadata"):
                    scored(executor, metadata={"x": value})


def test_a_request_fits_the_limits_of_each_server():
    with Faulty(good, limits={"max_batch": 2}) as small, Faulty(good) as large:
        with closing(remote(small, large, micro_batch=8)) as executor:
            assert_right(scored(executor, 16))
            assert_right(scored(executor, 16))
        assert max(len(request["items"]) for request in small.asked) <= 2

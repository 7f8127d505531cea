"""Judges that limit, charge, refuse and tell: what is asked of them, and how often."""

import asyncio
import collections
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from chat_servers import Scripted, completion, free_port, text_of
from flowrl_rewards.chat import client as chat_module
from flowrl_rewards.chat.account import BudgetSpent
from flowrl_rewards.chat.client import Chat
from flowrl_rewards.chat.messages import LONGEST_REST_S, Question, refusal
from flowrl_rewards.images import pngs

PICTURES = pngs(torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)), 8)
KEY = "sk-proj-Zq8wLx7RtYuIoPaSdFgHjKl1234"
RATE = 3  # requests a second that the judge allows


def questions(count: int) -> list[Question]:
    return [Question(images=PICTURES[:1], text=f"q{n}", max_tokens=9) for n in range(count)]


class Limited:
    """A judge that allows 3 requests in any second and says when to come back; of those it takes,
    5 % fail with 500 and 5 % are cut by the connection."""

    clock: "Clock"

    def __init__(self):
        self.taken, self.count = collections.deque(), 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        now = self.clock.time()
        while self.taken and now - self.taken[0] >= 1:
            self.taken.popleft()
        if len(self.taken) >= RATE:
            return httpx.Response(429, headers={"Retry-After": "1"}, json={})
        self.taken.append(now)
        self.count += 1
        if self.count % 20 == 7:
            return httpx.Response(500, json={})
        if self.count % 20 == 14:
            raise httpx.RemoteProtocolError("peer closed connection", request=request)
        text = text_of(json.loads(request.content))
        return httpx.Response(200, json=completion(f"said {text}"))


class Clock(asyncio.SelectorEventLoop):
    """The loop and the clock of the client of judges, and the servers that it asks: minutes of
    waiting in no time, since the time jumps to the next thing that is due."""

    def __init__(self, monkeypatch: Any, answer: Callable[[httpx.Request], Any]):
        super().__init__()
        self.at = 1000.0

        def connect(key: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.MockTransport(answer))

        monkeypatch.setattr(chat_module, "connect", connect)
        monkeypatch.setattr(chat_module, "_run", self.run_until_complete)
        monkeypatch.setattr(chat_module, "now", self.time)

    def time(self) -> float:
        return self.at

    def _run_once(self) -> None:
        scheduled = [handle for handle in self._scheduled if not handle._cancelled]  # type: ignore
        if not self._ready and scheduled:  # type: ignore
            self.at = max(self.at, min(handle._when for handle in scheduled))
        super()._run_once()  # type: ignore


def test_a_judge_that_limits_answers_all_in_little_more_than_the_time_it_asks_for(monkeypatch):
    judge, count = Limited(), 96
    judge.clock = clock = Clock(monkeypatch, judge)
    began = clock.time()
    replies = Chat("m", "http://example.com/v1").ask(questions(count))
    assert clock.time() - began <= 1.3 * count / RATE
    assert [reply.text for reply in replies] == [f"said q{n}" for n in range(count)]
    assert judge.count > count  # some were asked again


def test_a_rest_is_kept_by_all_questions(monkeypatch):
    asked: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(clock.time())
        if len(asked) == 1:
            return httpx.Response(429, headers={"Retry-After": "20"}, json={})
        return httpx.Response(200, json=completion("ok"))

    clock = Clock(monkeypatch, answer)
    chat = Chat("m", "https://example.com/v1", in_flight=1)
    chat.ask(questions(3))
    assert asked[0] == 1000 and all(1020 <= at < 1022 for at in asked[1:])


def test_parameters_are_sent_beside_flowrls_and_in_their_place():
    with Scripted(lambda body: completion("ok")) as server:
        changed = {"temperature": None, "max_tokens": None, "max_completion_tokens": 4}
        chat = Chat("m", server.url, parameters=changed)
        assert chat.ask(questions(1))[0].text == "ok"
        assert chat.version != Chat("m", server.url).version
    (body,) = server.asked
    assert body["max_completion_tokens"] == 4 and not {"temperature", "max_tokens"} & set(body)


def test_a_spent_quota_ends_the_run():
    quota = b'{"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}'
    with Scripted(lambda _: (429, {"Retry-After": "1"}, quota)) as server:
        with pytest.raises(BudgetSpent, match="quota is used up"):
            Chat("m", server.url, in_flight=1).ask(questions(9))
        assert len(server.asked) == 1


def test_a_budget_of_requests_holds_for_all_who_share_a_folder(tmp_path):
    with Scripted(lambda body: completion("ok")) as server:
        common = {"cache": str(tmp_path), "in_flight": 1}
        Chat("m", server.url, max_requests=5, **common).ask(questions(3))
        with pytest.raises(BudgetSpent, match="max_requests.*raise that to continue"):
            Chat("m", server.url, max_requests=5, **common).ask(questions(20))
        assert len(server.asked) == 5, "what was answered before counts"
        replies = Chat("m", server.url, max_requests=50, **common).ask(questions(20))
        assert all(reply.text for reply in replies)
        assert len(server.asked) == 20, "and what was paid for is not asked again"


def test_proxies_are_for_hosted_servers_alone(monkeypatch):
    with Scripted(lambda body: completion("by the proxy")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert Chat("m", "http://example.com/v1").ask(questions(1))[0].text == "by the proxy"
        for host in ("127.0.0.1", "localhost", "[::1]"):
            dead = f"http://{host}:{free_port()}/v1"
            assert Chat("m", dead).ask(questions(1))[0].missing, host


def test_no_key_is_in_any_file_log_or_message_where_a_server_echoes_it(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    told = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY[:20]}*** {KEY}"}})
    answers = [
        (401, {}, told.encode()),
        (500, {}, f"proxy error, Authorization: Bearer {KEY}".encode()),
        completion(f"your key is {KEY}, and the picture is worth 4"),
    ]
    settings = {"api_key_env": "JUDGE_KEY", "cache": str(tmp_path), "in_flight": 1}
    with Scripted(lambda body: answers.pop(0)) as server:
        chat = Chat("m", server.url, **settings)  # type: ignore[arg-type]
        replies = [chat.ask([q])[0] for q in questions(2)]
        assert "Bearer " + KEY in server.keys
    assert "does not take the key" in replies[0].missing and "worth 4" in replies[1].text
    texts = [repr(replies), repr(vars(chat)), *(record.getMessage() for record in caplog.records)]
    texts += [path.read_bytes().decode("latin-1") for path in Path(tmp_path).iterdir()]
    assert len(list(Path(tmp_path).iterdir())) > 0
    for text in texts:
        assert all(KEY[i : i + 8] not in text for i in range(len(KEY) - 7))
    with pytest.raises(ValueError, match="api_key_env") as caught:
        chat_module.connected({"model": "m", "api_key": KEY})
    assert KEY not in str(caught.value)


def test_a_rest_that_a_server_asks_for_is_capped():
    for asked, rest in (("1e9", LONGEST_REST_S), ("-3", 0), ("7", 7), ("soon", None)):
        assert refusal(429, {"retry-after": asked}, {}).retry_after == rest

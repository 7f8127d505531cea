"""A server under load and attack, on loopback: what it holds, whom it serves, whom it ends."""

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
import torch
import uvicorn

from flowrl.scoring.admission import ByteBudget, Turns, guarded_http
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.protocol import PROTOCOL, encode
from flowrl.scoring.server import MAX_PENDING, ScoringService, make_app

MB = 2**20


def test_a_budget_is_never_exceeded_and_is_given_in_the_order_of_asking():
    async def run() -> list[int]:
        budget, order = ByteBudget(10), []

        async def hold(number: int, size: int) -> None:
            async with budget.holding(size):
                assert budget.held <= 10
                order.append(number)
                await asyncio.sleep(0.001)

        tasks = [asyncio.create_task(hold(n, size)) for n, size in enumerate((6, 6, 3, 20, 1))]
        await asyncio.sleep(0)
        tasks[2].cancel()  # who leaves while it waits takes nothing
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.held == 0
        return order

    assert asyncio.run(run()) == [0, 1, 3, 4]


def test_clients_take_turns_however_much_each_has_asked():
    async def run() -> list[str]:
        turns: Turns[str] = Turns()
        for number in range(4):
            turns.put("greedy", f"g{number}")
        for client in ("a", "b"):
            turns.put(client, client)
        turns.drop("greedy", "g1")
        return [await turns.get() for _ in range(5)]

    assert asyncio.run(run()) == ["g0", "a", "b", "g2", "g3"]


def request_of(image: np.ndarray, count: int, key: str, codec: str = "raw") -> dict:
    import json

    blob = encode(image, codec)  # type: ignore[arg-type]
    items = [{"id": str(i), "prompt": "p"} for i in range(count)]
    head = {"protocol": PROTOCOL, "reward": "slow", "key": key, "codec": codec, "items": items}
    parts = [("request", (None, json.dumps(head), "application/json"))]
    return {"files": parts + [("image", ("x", blob, "application/octet-stream"))] * count}


class Slow:
    """Scores images when it is told to; counts calls and images."""

    def __init__(self) -> None:
        self.go, self.calls, self.images = threading.Event(), 0, 0

    def __call__(self, images, prompts, metadata):
        self.go.wait(20)
        self.calls, self.images = self.calls + 1, self.images + len(images)
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("number", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_large_requests_whose_clients_leave_cost_no_more_than_the_bound(serving, number):
    bound, idle_share = 32 * MB, 1.5
    reward = Slow()
    image = np.zeros((1024, 1024, 3), np.uint8)
    asked = request_of(image, 2, "KEY")  # 6 MB each, 1.2 GB together
    body = httpx.Request("POST", "http://host", **asked)
    content, kind = body.read().replace(b'"KEY"', b'"%03d"'), body.headers["content-type"]
    process, most = psutil.Process(), 0
    with serving(make_app({"slow": reward}, max_pending_bytes=bound)) as url:
        httpx.get(url + "/v1/info", trust_env=False)
        gc.collect()
        idle = process.memory_info().rss

        def attack(key: int) -> None:
            head = {"Content-Type": kind}
            sent = content.replace(b"%03d", b"%03d" % key)
            with pytest.raises(httpx.TimeoutException):
                httpx.post(
                    url + "/v1/score", content=sent, headers=head, timeout=0.2, trust_env=False
                )

        def watch() -> None:
            nonlocal most
            while not done.wait(0.01):
                most = max(most, process.memory_info().rss)

        done = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(attack, range(number)))
        done.set()
        watcher.join()
        reward.go.set()
        reply = httpx.post(url + "/v1/score", timeout=20, trust_env=False, **asked)
        assert reply.status_code == 200
    own = 4 * len(content)  # what the four clients hold is in this process, too
    assert most <= idle_share * idle + bound + own
    assert reward.images <= 2 * 8, "those who left were dropped, but for what had begun"


def test_an_image_of_very_many_pixels_is_refused_before_it_is_unpacked(serving):
    reward = Slow()
    reward.go.set()
    image = np.zeros((4097, 4096, 3), np.uint8)
    with serving(make_app({"slow": reward})) as url:
        for codec in ("png", "webp-lossless"):
            asked = request_of(image, 1, codec, codec)
            reply = httpx.post(url + "/v1/score", timeout=20, trust_env=False, **asked)
            assert reply.status_code == 422 and "4097 x 4096 pixels" in reply.json()["error"]
    assert not reward.calls
    assert MAX_PENDING == 256 * MB


@pytest.fixture
def guarded() -> Callable[..., tuple[str, uvicorn.Server]]:
    """Serve behind the connection limits, as `flowrl reward-serve` does."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app, **limits) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", http=guarded_http(**limits))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.append((server, thread))
        while not server.started:  # its event loop has files of its own, which a test counts
            time.sleep(0.01)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start  # type: ignore[misc]
    for server, thread in running:
        server.should_exit = True
        thread.join()


def half_sent(url: str, count: int) -> list[socket.socket]:
    port = int(url.rpartition(":")[2])
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", port)))
        found[-1].sendall(b"POST /v1/score HTTP/1.1\r\nHost: h\r\nX-Slow: ")
    return found


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_sent_headers_stop_nobody_and_end(guarded):
    reward = Slow()
    reward.go.set()
    url = guarded(make_app({"slow": reward}), connections=16, header_timeout=1.0)
    before = psutil.Process().num_fds()
    attackers = half_sent(url, 260)
    asked = request_of(np.zeros((8, 8, 3), np.uint8), 1, "mine")
    reply = httpx.post(url + "/v1/score", timeout=20, trust_env=False, **asked)
    assert reply.status_code == 200
    # 260 ends are this test's own; the server's are within its limit.
    assert psutil.Process().num_fds() - before - 260 <= 16 + 2
    assert all(is_closed(attacker) for attacker in attackers)
    for attacker in attackers:
        attacker.close()


def test_headers_that_trickle_end_also_on_a_connection_that_was_used(guarded):
    url = guarded(make_app({"slow": Slow()}), header_timeout=0.5)
    used = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    used.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
    while not (reply := used.recv(4096)).endswith(b"}"):
        assert reply.startswith(b"HTTP/1.1 200")
    used.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
    assert is_closed(used)
    used.close()


def test_eight_default_clients_are_served_alike_and_none_is_refused(serving):
    served: list[str] = []

    def waits(images, prompts, metadata):
        go.wait(20)
        served.extend(prompts)
        return images.mean((1, 2, 3))

    count = 192
    images, go = torch.zeros(count, 3, 32, 32), threading.Event()
    app = make_app({"waits": waits})
    with serving(app) as url:

        def ask(number: int) -> bool:
            client = HTTPExecutor("waits", [url])
            client.version  # noqa: B018  # connects
            scores, _ = client(images, [str(number)] * count, [{}] * count)
            client.close()
            return bool(scores.isfinite().all())  # type: ignore[union-attr]

        with ThreadPoolExecutor(8) as threads:
            complete = threads.map(ask, range(8))
            ends, service = time.monotonic() + 20, app.state.service
            # 4 requests each; two are taken up.
            while time.monotonic() < ends and len(service._turns.get("waits", ())) < 8 * 4 - 2:
                time.sleep(0.01)
            go.set()
            assert all(complete)
    # Until the fastest had all its scores, the slowest had half of them or more.
    ends = {client: len(served) - served[::-1].index(client) for client in set(served)}
    until = served[: min(ends.values())]
    assert min(until.count(client) for client in ends) >= count / 2


def test_requests_within_a_stated_wait_are_one_call_with_the_scores_of_each():
    calls: list[int] = []

    def mean(images, prompts, metadata):
        calls.append(len(images))
        return images.mean((1, 2, 3))

    from flowrl.scoring.protocol import LOSSLESS, Item, ScoreRequest

    async def run(wait: float) -> list[float | None]:
        service = ScoringService({"a": mean}, max_batch=8, codecs=LOSSLESS, batch_wait=wait)
        levels = [np.full((8, 8 + 8 * (n == 3), 3), 50 * n, np.uint8) for n in range(4)]
        asked = [
            service.answer(
                ScoreRequest(
                    protocol=1,
                    reward="a",
                    key=str(n),
                    codec="raw",
                    items=[Item(id="0", prompt="p")],
                ),  # fmt: skip
                [encode(image, "raw")],
                client=str(n),
            )
            for n, image in enumerate(levels)
        ]
        answers = await asyncio.gather(*asked)
        await service.close()
        return [answer.results[0].score for answer in answers]

    expected = pytest.approx([n * 50 / 255 for n in range(4)])
    assert asyncio.run(run(0.0)) == expected and sorted(calls) == [1, 1, 1, 1]
    calls.clear()
    assert asyncio.run(run(0.5)) == expected
    assert sum(calls) == 4 and len(calls) < 4  # of one size together

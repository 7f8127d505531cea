"""A real HTTP server that does wrong on demand, and images to ask it about."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.scorer import RewardResult, quantise, score
from flowrl.scoring.spec import RewardSpec

PATIENCE = 1.0  # seconds after a deadline; an answer must be there

Fault = Callable[["Handler", dict], None]


class Faulty:
    """Serves the reward "mean" and answers POSTs with `faults`, the last of them for ever.

    asked and tokens: what it was sent; probes: how often it was asked for its health; refused: how
    often it was sent too much. info: of the reward; served: of the server. absent: hangs up.
    """

    def __init__(
        self, *faults: Fault, version: str = "v1", served: dict | None = None, **info: Any
    ):
        self.served, self.absent, self.refused = served or {}, False, 0
        self.faults, self.version, self.info = list(faults), version, info
        self.asked: list[dict] = []
        self.probes = self.at_once = self.most_at_once = 0
        self.tokens: set[str | None] = set()
        self.lock, self.ending = threading.Lock(), threading.Event()
        handler = type("Bound", (Handler,), {"faulty": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Faulty":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, question: dict) -> Fault:
        with self.lock:
            self.asked.append(question)
            return self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]


class Handler(BaseHTTPRequestHandler):
    faulty: Faulty

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.faulty.absent:
            return
        self.faulty.tokens.add(self.headers["Authorization"])
        if self.path == "/healthz":
            self.faulty.probes += 1
            return self.send(200, {"status": "ready"})
        reward = {"name": "mean", "version": self.faulty.version} | self.faulty.info
        self.send(200, {"protocol": 1, "rewards": [reward]} | self.faulty.served)

    def do_POST(self) -> None:
        self.faulty.tokens.add(self.headers["Authorization"])
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.faulty.take(question)
        with self.faulty.lock:
            self.faulty.at_once += 1
            self.faulty.most_at_once = max(self.faulty.most_at_once, self.faulty.at_once)
        try:
            fault(self, question)
        except OSError:
            pass  # the client has left, as it may
        finally:
            self.faulty.at_once -= 1

    def send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def truth(faulty: Faulty, question: dict) -> dict:
    """The right answer: the mean of each image."""
    scores = []
    for item in question["items"]:
        with Image.open(io.BytesIO(base64.b64decode(item["image"]))) as image:
            scores.append(float(np.asarray(image, np.float32).mean() / 255))
    results = [
        {"id": item["id"], "score": s} for item, s in zip(question["items"], scores, strict=True)
    ]
    head = {"protocol": 1, "reward": "mean", "version": faulty.version, "key": question["key"]}
    return head | {"results": results}


def good(handler: Handler, question: dict) -> None:
    handler.send(200, truth(handler.faulty, question))


def status(code: int, error: str = "engine died", **headers: str) -> Fault:
    return lambda handler, question: handler.send(code, {"error": error}, **headers)


def body(data: bytes) -> Fault:
    return lambda handler, question: handler.send(200, data)


def changed(change: Callable[[dict], None]) -> Fault:
    """The right answer, after `change`. What json writes for NaN and infinity is sent as it is."""

    def answer(handler: Handler, question: dict) -> None:
        content = truth(handler.faulty, question)
        change(content)
        handler.send(200, content)

    return answer


def strict(max_batch: int = 16, max_body: int = 2**20) -> Fault:
    """Right answers to what is not too much."""

    def answer(handler: Handler, question: dict) -> None:
        size = int(handler.headers["Content-Length"])
        if size <= max_body and len(question["items"]) <= max_batch:
            return good(handler, question)
        handler.faulty.refused += 1
        handler.send(413, {"error": "too much"})

    return answer


def late(seconds: float, then: Fault = good) -> Fault:
    def answer(handler: Handler, question: dict) -> None:
        handler.faulty.ending.wait(seconds)
        then(handler, question)

    return answer


def drip(handler: Handler, question: dict) -> None:
    """A byte now and then for ever: no read takes long, the answer does."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.faulty.ending.wait(0.05):
        handler.wfile.write(b" ")


def truncated(handler: Handler, question: dict) -> None:
    handler.send(200, b'{"protocol": 1, ', Content_Length="1000")


def endless(handler: Handler, question: dict) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.faulty.ending.is_set():
        handler.wfile.write(b" " * 2**20)


def random_images(count: int) -> torch.Tensor:
    """(count, 3, 4, 5), the mean of each a little more than that of the one before."""
    return quantise(torch.linspace(0.1, 0.9, count)[:, None, None, None].expand(count, 3, 4, 5))


def ask(remote: HTTPExecutor, count: int = 3) -> RewardResult:
    """Score `count` images as a run does, and close. Fails when the deadline was missed."""
    spec = RewardSpec(name=remote.name, reward=remote, executor=remote)
    began = time.monotonic()
    try:
        prompts = [f"prompt {i}" for i in range(count)]
        return score([spec], random_images(count), prompts, [{} for _ in range(count)])
    finally:
        remote.close()
        assert time.monotonic() - began < remote.deadline + PATIENCE


def assert_missing(result, *words: str) -> None:
    """All scores are missing, never 0, and the message names reward, sample and remedy."""
    assert result.scores.isnan().all() and not result.valid.any()
    (message,) = result.errors.values()
    for word in ("mean", "prompt 0", *words):
        assert word in message or word in result.errors, message


def assert_right(result) -> None:
    torch.testing.assert_close(
        result.scores[:, 0], random_images(len(result.scores)).mean((1, 2, 3))
    )
    assert not result.errors


def remote(*servers: Faulty | str, **options: Any) -> HTTPExecutor:
    urls = [s if isinstance(s, str) else s.url for s in servers]
    return HTTPExecutor("mean", urls, **{"timeout": 3.0, "deadline": 6.0} | options)

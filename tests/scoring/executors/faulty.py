"""A real HTTP server that does wrong on demand, and images to send it."""

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

from flowrl.config.rewards import HTTPOptions
from flowrl.scoring.executors.base import Answer
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.scorer import quantise

PATIENCE = 1.0  # seconds after a deadline; an answer must be there

Fault = Callable[["Handler", dict], None]


class Faulty:
    """Serves the reward "mean" and answers POSTs with `faults`, the last of them for ever.

    received: the bodies; most_at_once: of requests; info: of the reward; limits: of the server.
    """

    def __init__(
        self, *faults: Fault, version: str = "v1", limits: dict | None = None, **info: Any
    ):
        self.limits, self.faults, self.version, self.info = (
            limits or {}, list(faults), version, info,
        )  # fmt: skip
        self.received: list[dict] = []
        self.tokens: set[str | None] = set()
        self.at_once = self.most_at_once = 0
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

    def take(self, request: dict) -> Fault:
        with self.lock:
            self.received.append(request)
            return self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]


class Handler(BaseHTTPRequestHandler):
    faulty: Faulty

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.faulty.tokens.add(self.headers["Authorization"])
        reward = {"name": "mean", "version": self.faulty.version} | self.faulty.info
        self.send(200, {"protocol": 1, "rewards": [reward]} | self.faulty.limits)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.faulty.take(request)
        with self.faulty.lock:
            self.faulty.at_once += 1
            self.faulty.most_at_once = max(self.faulty.most_at_once, self.faulty.at_once)
        try:
            fault(self, request)
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


def changed(change: Callable[[dict], Any]) -> Fault:
    """Return the mean of each image, after `change`; NaN and infinity are sent as json has them."""

    def answer(handler: Handler, request: dict) -> None:
        results = []
        for item in request["items"]:
            with Image.open(io.BytesIO(base64.b64decode(item["image"]))) as image:
                score = float(np.asarray(image, np.float32).mean() / 255)
            results.append({"id": item["id"], "score": score})
        head = {"protocol": 1, "reward": "mean", "version": handler.faulty.version}
        content = head | {"key": request["key"], "results": results}
        change(content)
        handler.send(200, content)

    return answer


good = changed(lambda content: None)


def status(code: int, error: str = "engine died", **headers: str) -> Fault:
    return lambda handler, request: handler.send(code, {"error": error}, **headers)


def body(data: bytes) -> Fault:
    return lambda handler, request: handler.send(200, data)


def late(seconds: float, then: Fault = good) -> Fault:
    def answer(handler: Handler, request: dict) -> None:
        handler.faulty.ending.wait(seconds)
        then(handler, request)

    return answer


def endless(pause: float, size: int) -> Fault:
    """Send `size` bytes every `pause` seconds for ever: no read takes long, the answer does."""

    def answer(handler: Handler, request: dict) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not handler.faulty.ending.wait(pause):
            handler.wfile.write(b" " * size)

    return answer


def truncated(handler: Handler, request: dict) -> None:
    handler.send(200, b'{"protocol": 1, ', Content_Length="1000")


def images_of(count: int) -> torch.Tensor:
    """(count, 3, 4, 5), the mean of each a little more than that of the one before."""
    return quantise(torch.linspace(0.1, 0.9, count)[:, None, None, None].expand(count, 3, 4, 5))


def remote(*servers: Faulty | str, **options: Any) -> HTTPExecutor:
    urls = [s if isinstance(s, str) else s.url for s in servers]
    return HTTPExecutor(
        "mean", HTTPOptions(**{"urls": urls, "timeout": 3.0, "deadline": 6.0} | options)
    )


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

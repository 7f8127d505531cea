"""A real HTTP server that does wrong on demand, and images to send it."""

import base64
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from chat_servers import Scripted
from PIL import Image

from flowrl.config.rewards import HTTPOptions
from flowrl.scoring.executors.base import Answer
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.scorer import quantise

PATIENCE = 1.0  # seconds after a deadline; an answer must be there

Fault = Callable[["Faulty", dict], Any]  # the server and a request -> what `Scripted` says


class Faulty(Scripted):
    """Serves the reward "mean" and answers POSTs with `faults`, the last of them for ever.

    most_at_once: of requests; info: of the reward; limits: of the server.
    """

    def __init__(
        self, *faults: Fault, version: str = "v1", limits: dict | None = None, **info: Any
    ):
        self.limits, self.faults, self.version, self.info = (
            limits or {}, list(faults), version, info,
        )  # fmt: skip
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

"""Ask the reward servers of other projects: their requests and answers, as flowrl's protocol.

A transport of httpx stands between `http.Client` and the server, so that retries, deadlines and
rests are the same for all. UniRL: POST /score, GET /rewards; Flow-Factory: POST /compute.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from flowrl.scoring.protocol import PROTOCOL

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One project's wire."""

    asks: str  # what is asked for, to see which rewards there are
    scores: str  # where images go
    health: str
    names: Callable[[Any, str], list[str]]  # the answer to `asks`, the reward's name
    write: Callable[[Body], Body]  # flowrl's request -> theirs
    read: Callable[[Any, Body], list[Body]]  # their answer, flowrl's request -> flowrl's results


# --- UniRL ----------------------------------------------------------------------------------------


def _unirl_names(answer: Any, name: str) -> list[str]:
    """Return the rewards of a server, and this one's part if it has one: REWARD/PART."""
    found = answer.get("rewards") if isinstance(answer, dict) else answer
    if not isinstance(found, list):
        raise ValueError("answered GET /rewards without a list of rewards")
    known = [str(reward) for reward in found]
    return known + ([name] if name.partition("/")[0] in known else [])


def _unirl_write(body: Body) -> Body:
    reward = body["reward"].partition("/")[0]
    return {
        "requests": [
            {
                "history": [{"text": item["prompt"], "image_b64": item["image"]}],
                "required_rewards": [reward],
                "metadata": item["metadata"] or None,
            }
            for item in body["items"]
        ]
    }


def _unirl_read(answer: Any, body: Body) -> list[Body]:
    results = answer["results"]
    errors = answer.get("errors")
    if not isinstance(errors, list) or len(errors) != len(results):  # one text for all, or none
        errors = [errors] * len(results)
    reward, _, part = body["reward"].partition("/")
    return [
        _unirl_result(_own(scores, reward), _own(error, reward), reward, part)
        for scores, error in zip(results, errors, strict=True)
    ]


def _own(found: Any, reward: str) -> Any:
    """Return what an item's object has for a reward; anything but an object as it is."""
    return found.get(reward) if isinstance(found, dict) else found


def _unirl_result(scores: Any, error: Any, reward: str, part: str) -> Body:
    if not scores or not isinstance(scores, dict):
        told = str(error) if error else f"the server gave no score of {reward}"
        return {"score": None, "error": told}
    wanted = part or (reward if reward in scores else "")
    if not wanted and len(scores) == 1:
        wanted = next(iter(scores))
    if wanted not in scores:
        parts = ", ".join(f"{reward}/{name}" for name in scores)
        return {"score": None, "error": f"{reward} has several parts: name one of {parts}"}
    return _scored(scores[wanted], f"{reward}/{wanted}")


def _scored(value: Any, name: str) -> Body:
    """Return one item's result; what is no number is missing, and costs no other item."""
    try:
        return {"score": float(value), "error": None}
    except (TypeError, ValueError):
        return {"score": None, "error": f"the server gave {value!r:.40} for {name}"}


# --- Flow-Factory ---------------------------------------------------------------------------------


def _flow_factory_write(body: Body) -> Body:
    items = body["items"]
    return {
        "prompt": [item["prompt"] for item in items],
        "image": [item["image"] for item in items],
        "video": None,
        "condition_images": None,
        "condition_videos": None,
        "extra": {"metadata": [item["metadata"] for item in items]},
    }


def _flow_factory_read(answer: Any, body: Body) -> list[Body]:
    if answer.get("error"):
        raise ValueError(f"answered with an error: {answer['error']}")
    rewards = answer["rewards"]
    return [_scored(value, body["reward"]) for value in rewards]


DIALECTS = {
    "unirl": Dialect(
        asks="/rewards", scores="/score", health="/health",
        names=_unirl_names, write=_unirl_write, read=_unirl_read,
    ),
    "flow_factory": Dialect(
        asks="/health", scores="/compute", health="/health",
        names=lambda answer, name: [name], write=_flow_factory_write, read=_flow_factory_read,
    ),
}  # fmt: skip


class DialectTransport(httpx.AsyncBaseTransport):
    """Sends flowrl's requests in another dialect and gives flowrl's answers back."""

    def __init__(
        self, dialect: Dialect, reward: str, inner: httpx.AsyncBaseTransport | None = None
    ):
        self.dialect, self.reward = dialect, reward
        self.inner = inner or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        base, _, path = str(request.url).rpartition("/v1/")
        if not base:  # /healthz
            own = str(request.url).rpartition("/")[0] + self.dialect.health
            return await self._send(request, "GET", own)
        if path == "info":
            found = await self._send(request, "GET", base + self.dialect.asks)
            return self._translated(found, self._info)
        body = json.loads(request.content)
        asked = self.dialect.write(body)
        found = await self._send(request, "POST", base + self.dialect.scores, asked)
        return self._translated(found, lambda answer: self._scores(answer, body))

    async def _send(
        self, request: httpx.Request, method: str, url: str, body: Body | None = None
    ) -> httpx.Response:
        """Return the server's answer, its body still to be read."""
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("content-length", "content-type", "host")
        }
        own = httpx.Request(method, url, headers=headers, json=body, extensions=request.extensions)
        found = await self.inner.handle_async_request(own)
        await found.aread()
        await found.aclose()
        kept = {k: found.headers[k] for k in ("retry-after",) if k in found.headers}
        return _answer(found.content, found.status_code, kept)

    def _translated(self, found: httpx.Response, read: Callable[[Any], Body]) -> httpx.Response:
        """Return the answer in flowrl's words; one that is not 200, or not theirs, as it is."""
        if found.status_code != 200:
            return found
        data = b"".join(found.iter_raw())
        try:
            return _answer(json.dumps(read(json.loads(data))).encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _answer(f"no answer of this dialect: {error!r}".encode())

    def _info(self, answer: Any) -> Body:
        names = dict.fromkeys(self.dialect.names(answer, self.reward))
        return {
            "protocol": PROTOCOL,
            "rewards": [{"name": name} for name in names],
            "codecs": ["png", "webp-lossless", "jpeg"],  # whatever Pillow reads
        }

    def _scores(self, answer: Any, body: Body) -> Body:
        results = self.dialect.read(answer, body)
        ids = [item["id"] for item in body["items"]]
        return {
            "protocol": PROTOCOL,
            "reward": body["reward"],
            "key": body["key"],
            # A wrong number of results is found by the client, which compares ids.
            "results": [{"id": i} | its for i, its in zip(ids, results, strict=False)],
        }

    async def aclose(self) -> None:
        await self.inner.aclose()


def _answer(
    data: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Return an answer whose body the client has yet to read."""
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(data))

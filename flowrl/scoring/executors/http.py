"""Call rewards on HTTP servers: `flowrl reward-serve`, or others of docs/reward-servers.md.

`HTTPExecutor` splits images into requests. Each goes to the server with the fewest open ones; a
server that fails rests, for longer the longer it has failed, and the request is retried until the
deadline. An answer arrives within `deadline` seconds whatever the servers do: an image without a
score has a reason.
"""

import asyncio
import base64
import functools
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

import httpx
import numpy as np
from anyio.from_thread import start_blocking_portal
from pydantic import ValidationError
from torch import Tensor

from flowrl.config.rewards import HTTPOptions
from flowrl.scoring.executors.base import (
    Answer,
    RewardFailure,
    failed,
    joined,
    read_answer,
    to_levels,
)
from flowrl.scoring.protocol import (
    PROTOCOL,
    Info,
    Response,
    RewardInfo,
    encode,
    error_message,
)
from flowrl.utils.serving import token_of

SILENCE = 0.25  # share of the deadline without a byte, after which a request is retried
CONNECT_S = 5.0
IN_FLIGHT = 4  # requests at the same time
FIRST_REST_S, LONGEST_REST_S = 0.1, 600.0  # of a server that fails
LONGEST_RETRY_AFTER_S = 60.0  # whatever a server asks for
REMEDIES = {
    401: "; name the variable with its token in executor.token_env",
    404: "; look at executor.urls",
    413: "; lower executor.micro_batch",
}

T = TypeVar("T")


class Again(Exception):
    """A failure to retry. `retry_after`: seconds that the server asks for."""

    def __init__(self, sentence: str, retry_after: float | None = None):
        super().__init__(sentence)
        self.retry_after = retry_after


@dataclass(slots=True, kw_only=True)
class Server:
    """The state of one server."""

    url: str
    info: Info | None = None  # None where it may have been replaced: fetched before the next use
    open: int = 0  # requests
    failing_since: float | None = None
    rests_until: float = 0.0  # of time.monotonic()
    trouble: str = "has not answered"

    def note_failure(self, error: Again) -> None:
        """Let it rest: as long as it says, else half as long as it has been failing."""
        now, self.trouble = time.monotonic(), str(error)
        if error.retry_after is not None:  # it is busy, not broken
            rest = min(error.retry_after, LONGEST_RETRY_AFTER_S)
        else:
            self.info = None
            self.failing_since = self.failing_since or now
            rest = min((now - self.failing_since) / 2, LONGEST_REST_S) * random.uniform(1, 1.2)
        self.rests_until = now + max(rest, FIRST_REST_S)

    @property
    def rest(self) -> float:
        """Return seconds until it may be asked."""
        return max(0.0, self.rests_until - time.monotonic())

    def __str__(self) -> str:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.rest))
        return f"{self.url} {self.trouble}" + (f", rests until {until}" if self.rest > 1 else "")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Images that are scored together."""

    reward: str
    ids: list[str]
    images: np.ndarray  # (b, H, W, 3) uint8
    prompts: list[str]
    metadata: list[dict]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # the same in every try

    @functools.cached_property
    def body(self) -> bytes:
        """The JSON of the request. Raises RewardFailure for other metadata."""
        blobs = [base64.b64encode(encode(image)).decode() for image in self.images]
        items = [
            {"id": name, "prompt": prompt, "metadata": data, "image": blob}
            for name, prompt, data, blob in zip(
                self.ids, self.prompts, self.metadata, blobs, strict=True
            )
        ]
        head = {"protocol": PROTOCOL, "reward": self.reward, "key": self.key}
        try:
            return json.dumps(head | {"items": items}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailure(
                f"reward {self.reward!r} is on a server, and metadata travel as JSON: {error}"
            ) from error


class HTTPExecutor:
    """The reward `name` of the servers at `options.urls`, as executor and as reward.

    It asks servers in an event loop of its own thread; each call ends within the deadline. Its
    attributes version, bounds, scope and so on are fetched at first use, and raise RewardFailure
    when no server answers in time.

    Raises:
        UserError: for a token that is missing or that no HTTP header can hold.
    """

    differentiable = False
    version = property(lambda self: self._info.version)
    bounds = property(lambda self: self._info.bounds)
    scope = property(lambda self: self._info.scope)
    required_metadata = property(lambda self: self._info.required_metadata)
    deterministic = property(lambda self: self._info.deterministic)

    def __init__(self, name: str, options: HTTPOptions):
        self.name, self.options = name, options
        self.servers = [Server(url=url.rstrip("/")) for url in options.urls]
        self._token = token_of(options.token_env, "executor.token_env")
        self._version: tuple[str, str] | None = None  # URL and version of the first answer
        self._lock = Lock()
        self._open: ExitStack | None = None  # the thread and its connections, None without
        self._started: WeakSet[Future[Any]] = WeakSet()

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        answer = self.submit(images, prompts, metadata).result()
        return answer.scores, dict(answer.reasons)

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        pixels = to_levels(images).permute(0, 2, 3, 1).contiguous().numpy()
        return self._start(self._score, pixels, prompts, metadata)

    def close(self) -> None:
        """End the thread and its connections; what was not answered is cancelled."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            for future in list(self._started):
                future.cancel()
            opened.close()

    @functools.cached_property
    def _info(self) -> RewardInfo:
        ends = time.monotonic() + self.options.deadline
        try:
            return self._start(self._retry, ends, self._introduce).result()
        except TimeoutError as error:
            raise RewardFailure(f"reward {self.name!r}: {error}") from error

    def _start(self, work: Callable[..., Awaitable[T]], *args: Any) -> "Future[T]":
        """Start one of the methods below in the event loop, which begins with the first."""
        with self._lock:
            if self._open is None:
                timeout = SILENCE * self.options.deadline
                self._http = httpx.AsyncClient(
                    headers={"Accept-Encoding": "identity"}
                    | ({"Authorization": f"Bearer {self._token}"} if self._token else {}),
                    timeout=httpx.Timeout(timeout, connect=min(CONNECT_S, timeout), pool=None),
                    trust_env=False,  # proxies of companies answer for servers next door, wrongly
                )
                self._slots = asyncio.Semaphore(IN_FLIGHT)
                self._open = ExitStack()
                self._portal = self._open.enter_context(start_blocking_portal())
                self._open.enter_context(self._portal.wrap_async_context_manager(self._http))
            future = self._portal.start_task_soon(work, *args)
        self._started.add(future)
        return future

    # --- in the event loop ------------------------------------------------------------------------

    async def _score(self, images: np.ndarray, prompts: list[str], metadata: list[dict]) -> Answer:
        """Score images (B, H, W, 3) uint8. Raises RewardFailure for what no retry mends."""
        began, count = time.monotonic(), len(prompts)
        ends = began + self.options.deadline
        try:
            info = await self._retry(ends, self._introduce)
        except TimeoutError as error:
            return failed(count, str(error), time.monotonic() - began)
        size = self._request_size(info, count, *images.shape[1:3])
        tasks = []
        for start in range(0, count, size):
            rows = slice(start, start + size)
            request = _Request(
                reward=self.name, ids=[str(row) for row in range(count)[rows]],
                images=images[rows], prompts=prompts[rows], metadata=metadata[rows],
            )  # fmt: skip
            tasks.append(asyncio.create_task(self._score_request(request, ends)))
        try:
            parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return joined(parts, time.monotonic() - began)

    def _request_size(self, info: RewardInfo, count: int, height: int, width: int) -> int:
        """Return the most images of a request. Raises RewardFailure for a group that is larger."""
        limits = [s.info.max_images(height, width) for s in self.servers if s.info is not None]
        if info.scope == "sample" and self.options.micro_batch is not None:
            return min(self.options.micro_batch, *limits)
        if limits and count > max(limits):
            raise RewardFailure(
                f"reward {self.name!r}: {count} images must not be split, and its server takes "
                f"{max(limits)} at a time; raise --max-body there, or lower rollout.group_size"
            )
        return max(count, 1)

    async def _score_request(self, request: _Request, ends: float) -> Answer:
        try:
            async with asyncio.timeout(ends - time.monotonic()), self._slots:
                return await self._retry(ends, functools.partial(self._try, request))
        except TimeoutError as error:
            return failed(len(request.ids), str(error) or self._too_late())

    async def _retry(self, ends: float, work: Callable[[Server], Awaitable[T]]) -> T:
        """Do `work` with a server, again after each Again until `ends` of time.monotonic().

        Raises TimeoutError that says what the servers did.
        """
        try:
            async with asyncio.timeout(ends - time.monotonic()):
                while True:
                    server = min(self.servers, key=lambda s: (s.rest, s.open))
                    if rest := server.rest:
                        if time.monotonic() + rest > ends:
                            raise TimeoutError
                        await asyncio.sleep(rest)
                        continue  # another may be free by now
                    server.open += 1
                    try:
                        return await work(server)
                    except Again as error:
                        server.note_failure(error)
                    finally:
                        server.open -= 1
        except TimeoutError:
            raise TimeoutError(self._too_late()) from None

    def _too_late(self) -> str:
        return (
            f"no score within {self.options.deadline:g} s: {'; '.join(map(str, self.servers))}; "
            "see that a server runs, look at its log, or raise executor.deadline"
        )

    async def _introduce(self, server: Server) -> RewardInfo:
        """Return a server's description of the reward, and check it.

        Raises RewardFailure for a server without it, and for another version than before.
        """
        if server.info is None:
            data = await self._send(server, "GET", "/v1/info")
            try:
                server.info = Info.model_validate_json(data)
            except ValidationError as error:
                raise self._refuse(
                    server,
                    f"does not speak protocol {PROTOCOL} of reward servers "
                    f"({error_message(error)}); look at executor.urls",
                ) from error
        reward = next((one for one in server.info.rewards if one.name == self.name), None)
        if reward is None:
            names = ", ".join(one.name for one in server.info.rewards) or "none"
            raise self._refuse(server, f"does not serve it; it serves {names}")
        self._check_version(server, reward.version)
        return reward

    def _check_version(self, server: Server, version: str) -> None:
        url, first = self._version = self._version or (server.url, version)
        if version != first:
            raise self._refuse(
                server,
                f"has version {version!r}, and {url} had {first!r} in this run; their scores do "
                "not compare: serve one version",
            )

    def _refuse(self, server: Server, sentence: str) -> RewardFailure:
        return RewardFailure(f"reward {self.name!r}: {server.url} {sentence}")

    async def _try(self, request: _Request, server: Server) -> Answer:
        await self._introduce(server)
        body = await asyncio.to_thread(lambda: request.body)
        headers = {"Content-Type": "application/json"}
        data = await self._send(server, "POST", "/v1/score", content=body, headers=headers)
        server.failing_since, server.trouble = None, "has not answered"
        try:
            response = self._read_response(request, data)
        except ValueError as error:  # a retry would be answered alike
            return failed(len(request.ids), f"{server.url} {error}; look at its log")
        self._check_version(server, response.version)
        results = response.results
        reasons = {row: result.error for row, result in enumerate(results) if result.error}
        answer = read_answer(([result.score for result in results], reasons), len(results))
        named = {row: f"{text} (at {server.url})" for row, text in answer.reasons.items()}
        return replace(answer, reasons=named)

    def _read_response(self, request: _Request, data: bytes) -> Response:
        """Return the response to a request. Raises ValueError for anything else."""
        try:
            response = Response.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(f"answered no JSON of scores ({error_message(error)})") from error
        if response.key != request.key:
            raise ValueError("answered another request, by its key")
        if response.reward != self.name or [r.id for r in response.results] != request.ids:
            raise ValueError(
                f"answered with {len(response.results)} results for {len(request.ids)} images, or "
                "for other images than were sent"
            )
        return response

    async def _send(self, server: Server, method: str, path: str, **content: Any) -> bytes:
        """Return the body of a 200 answer.

        Raises Again for what to retry, RewardFailure where the server refuses.
        """
        try:
            reply = await self._http.request(method, server.url + path, **content)
        except httpx.RequestError as error:
            raise Again(self._describe(error)) from error
        code = reply.status_code
        if code == 200:
            return reply.content
        status = f"answered {code} ({_refusal_of(reply)})"
        if code in (408, 429) or code >= 500:
            seconds = reply.headers.get("retry-after", "")  # or a date, which does not count
            raise Again(status, float(seconds) if seconds.isdecimal() else None)
        raise self._refuse(server, f"{status}{REMEDIES.get(code, '')}")

    def _describe(self, error: Exception) -> str:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return f"cannot be reached ({error or 'no connection in time'})"
        if isinstance(error, httpx.TimeoutException):
            return f"did not answer within {SILENCE * self.options.deadline:g} s"
        return f"broke off ({error})"


def _refusal_of(reply: httpx.Response) -> str:
    """Return the server's sentence, or the text of an answer without one."""
    try:
        return str(reply.json()["error"])[:400]
    except (ValueError, TypeError, KeyError):
        return reply.text[:400].strip() or "no text"

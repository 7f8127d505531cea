"""Call rewards on HTTP servers: `flowrl reward-serve`, or others of docs/reward-servers.md.

`HTTPExecutor` splits images into requests; its `Client` sends them to the servers in turn. Failed
requests are retried with growing pauses. A server that failed `OPENS_AFTER` times in a row is not
used for some seconds, and then only after it answered /healthz. An answer is there within
`deadline` seconds whatever the servers do: an image without a score has a reason.
"""

import asyncio
import base64
import functools
import ipaddress
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx
import numpy as np
import tenacity
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import ValidationError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.executors.base import (
    Answer,
    RewardFailure,
    all_finite,
    failed,
    joined,
    read_answer,
    to_levels,
)
from flowrl.scoring.protocol import (
    CODECS,
    PROTOCOL,
    TOKEN_RULE,
    Codec,
    Info,
    Refusal,
    Response,
    RewardInfo,
    encode,
    error_message,
    is_sendable,
)

CONNECT = 5.0  # seconds
OPENS_AFTER = 3  # failures in a row
BACKOFF = tenacity.wait_exponential(multiplier=0.1, max=5.0) + tenacity.wait_random(0.0, 0.1)
LONGEST_REST = 30.0  # seconds without requests to a server that asks to wait
LONGEST_PAUSE = 600.0  # seconds without requests after all servers were silent
MAX_ANSWER = 16 * 2**20  # bytes
TRY_AGAIN = {408, 429}  # and 5xx: only these answers are retried
REMEDIES = {
    401: "; name the variable with its token in executor.token_env",
    404: "; look at executor.urls",
    413: "; lower executor.micro_batch",
}

T = TypeVar("T")


def is_loopback(url: str) -> bool:
    """Return whether a server runs on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HTTPExecutor:
    """The reward `name` of the servers at `urls`, as executor and as reward.

    version, bounds, scope, required_metadata and deterministic are fetched at first use, and raise
    RewardFailure when no server answers in time.

    Args:
        timeout: seconds without a byte, after which a request is retried.
        deadline: seconds for all tries of one `submit`, its time in the queue included.
        micro_batch: most images of a request; None never splits, as groups never are.
        in_flight: most requests at the same time.
        codec: how images travel; auto is raw to servers of this machine and webp-lossless to
            others, if they take it.
        token: the servers' bearer token.

    Raises:
        UserError: for invalid addresses, limits, codecs and tokens.
    """

    differentiable = False
    version = property(lambda self: self._info().version)
    bounds = property(lambda self: self._info().bounds)
    scope = property(lambda self: self._info().scope)
    required_metadata = property(lambda self: tuple(self._info().required_metadata))
    deterministic = property(lambda self: self._info().deterministic)
    components = property(lambda self: tuple(self._info().components))

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        timeout: float = 30.0,
        deadline: float = 120.0,
        micro_batch: int | None = 16,
        in_flight: int = 4,
        codec: Codec | Literal["auto"] = "auto",
        token: str | None = None,
    ):
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise UserError(f"reward {name!r}: got urls {list(urls)}; expected http://HOST:PORT")
        if codec not in ("auto", *CODECS):
            known = ", ".join(("auto", *CODECS))
            raise UserError(f"reward {name!r}: codec is one of {known}, not {codec!r}")
        limits = {"timeout": timeout, "deadline": deadline, "in_flight": in_flight}
        for option, value in (limits | {"micro_batch": micro_batch}).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"reward {name!r}: {option} is {value}, expected a finite number more than 0"
                )
        if token and not is_sendable(token):
            raise UserError(f"reward {name!r}: its token {TOKEN_RULE}")
        self.name, self.deadline, self.micro_batch = name, deadline, micro_batch
        self._make_client = functools.partial(
            Client, name, list(urls), **limits, codec=codec, token=token
        )
        self._opening = Lock()
        self._session: _Session | None = None
        self._known: RewardInfo | None = None
        self._pause = _Pause(deadline)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor | dict[str, Tensor], dict[int, str]]:
        answer = self.submit(images, prompts, metadata).result()
        named = {name: part.scores for name, part in answer.components.items()}
        return named or answer.scores, dict(answer.reasons)

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        if not all_finite(images):
            future: Future[Answer] = Future()
            future.set_result(failed(len(images), "images hold NaN or infinite pixels"))
            return future
        levels = to_levels(images).numpy()
        pixels = np.empty((len(levels), *levels.shape[2:], 3), np.uint8)
        for channel in range(3):  # a third of the time of one transposed copy
            pixels[..., channel] = levels[:, channel]
        session = self._opened()
        return session.start(self._answer, session.client, pixels, prompts, metadata)

    def close(self) -> None:
        """End all threads; what was not answered is cancelled."""
        with self._opening:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _opened(self) -> "_Session":
        """Return the threads and connections, which begin at first use."""
        with self._opening:
            self._session = self._session or _Session(self._make_client())
            return self._session

    def _info(self) -> RewardInfo:
        if self._known is None:
            session = self._opened()
            if left := self._pause.left():
                reason = self._pause_reason(session.client, left)
                raise RewardFailure(f"reward {self.name!r}: {reason}")
            began = time.monotonic()
            work = session.start(session.client.fetch_info, began + self.deadline)
            try:
                self._known = work.result()
            except (Again, TimeoutError) as error:
                self._pause.note(heard=False, began=began)
                reason = session.client.too_late()
                raise RewardFailure(f"reward {self.name!r}: {reason}") from error
        return self._known

    def _pause_reason(self, client: "Client", left: float) -> str:
        return (
            f"not asked, since no server answered within {self.deadline:g} s before; the next try "
            f"is in {left:.0f} s: {client.troubles()}"
        )

    async def _answer(
        self, client: "Client", images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> Answer:
        """Score images (B, H, W, 3) uint8."""
        began = time.monotonic()
        if left := self._pause.left():
            return failed(len(prompts), self._pause_reason(client, left))
        parts = await self._parts(client, images, prompts, metadata)
        if prompts:
            self._pause.note(heard=client.heard >= began, began=began)
        return joined(parts, time.monotonic() - began)

    async def _parts(
        self, client: "Client", images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> list[Answer]:
        ends, count = time.monotonic() + self.deadline, len(prompts)
        try:
            info = await client.fetch_info(ends)
        except (Again, TimeoutError):
            return [failed(count, client.too_late())]
        tasks = []
        most = [server.limit(*images.shape[1:3]) for server in client.infos()]
        size = self._request_size(info, most, count)
        for start in range(0, count, size):
            rows = slice(start, start + size)
            ids = [str(row) for row in range(count)[rows]]
            part = client.score(ids, images[rows], prompts[rows], metadata[rows], ends)
            tasks.append(asyncio.create_task(part))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _request_size(self, info: RewardInfo, max_batches: list[int], count: int) -> int:
        """Return the most images of a request, by the servers' `max_batches` and `micro_batch`."""
        if info.scope == "sample" and self.micro_batch is not None:
            return min(self.micro_batch, *max_batches)
        most = max(max_batches)
        if count > most:
            raise RewardFailure(
                f"reward {self.name!r}: {count} images must not be split, and its server takes "
                f"{most} at a time; raise --max-batch or --max-pixels there, or lower "
                "rollout.group_size"
            )
        return max(count, 1)


class _Session:
    """A client and the thread of its event loop."""

    def __init__(self, client: "Client"):
        self.client = client
        self._started: WeakSet[Future[Any]] = WeakSet()
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._stack.enter_context(self._portal.wrap_async_context_manager(client.http))

    def start(self, work: Callable[..., Awaitable[T]], *args: Any) -> "Future[T]":
        future = self._portal.start_task_soon(work, *args)
        self._started.add(future)
        return future

    def close(self) -> None:
        for future in list(self._started):
            future.cancel()
        self._stack.close()


class _Pause:
    """The pause after servers were silent for a whole deadline twice in a row, longer each time:
    dead servers must not cost a deadline at every batch."""

    def __init__(self, deadline: float):
        self._deadline, self._silences, self._until, self._noted = deadline, 0, 0.0, 0.0

    def left(self) -> float:
        """Return the seconds until the pause ends."""
        return max(0.0, self._until - time.monotonic())

    def note(self, *, heard: bool, began: float) -> None:
        """Record how a submission begun at `began` ended; simultaneous ones count once."""
        now = time.monotonic()
        if heard:
            self._silences, self._until = 0, 0.0
        elif began >= self._noted:
            self._silences, self._noted = self._silences + 1, now
            if self._silences > 1:
                pause = self._deadline * 2 ** (self._silences - 2)
                self._until = now + min(LONGEST_PAUSE, pause)


class Again(Exception):
    """A failure to retry. after: least seconds to wait first."""

    def __init__(self, sentence: str, after: float = 0.0):
        super().__init__(sentence)
        self.after = after


class TooLarge(RewardFailure):
    """A server answered 413: the request is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request body for images that are scored together."""

    ids: list[str]
    key: str  # the same in every try, so that none counts twice
    content: dict[str, Any]  # arguments for httpx
    size: int  # bytes, at most
    multipart: bool


@dataclass(slots=True, kw_only=True)
class Server:
    """The state of one server."""

    url: str
    failures: int = 0  # in a row
    suspect: bool = False  # it must answer /healthz before it is used
    rests_until: float = 0.0
    info: Info | None = None  # its last answer to /v1/info
    stale: bool = True  # it may have been replaced: `info` is fetched again before it is used
    trouble: str = "has not answered"

    def takes(self, request: _Request) -> bool:
        """Return whether its limits allow a request, as far as they are known."""
        info, refusal = self.info, ""
        if info is None or self.stale:
            return True
        if len(request.ids) > info.max_batch:
            refusal = f"takes {info.max_batch} images at a time, not {len(request.ids)}"
        elif request.size > info.max_body:
            refusal = f"takes {info.max_body} bytes at a time, not {request.size}"
        elif request.multipart and "multipart" not in info.forms:
            refusal = "takes no multipart/form-data"
        self.trouble = refusal or self.trouble
        return not refusal


@dataclass(kw_only=True)
class Client:
    """Sends requests to the servers of one reward in turn; to be used in one event loop only."""

    name: str = field(kw_only=False)
    urls: list[str] = field(kw_only=False)
    timeout: float
    deadline: float
    codec: Codec | Literal["auto"]
    token: str | None
    in_flight: int

    def __post_init__(self) -> None:
        self.servers = [Server(url=url.rstrip("/")) for url in self.urls]
        self.heard = -math.inf  # when a server last gave scores
        self._pause = min(self.timeout, CONNECT)  # of a server that failed
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        # Proxies of the environment are not for servers next door: many answer 503 for localhost.
        self.http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", "X-Client": uuid.uuid4().hex} | headers,
            timeout=httpx.Timeout(self.timeout, connect=self._pause, pool=None),
            trust_env=False,
        )
        self._next = 0
        self._known: RewardInfo | None = None
        self._version: tuple[str, str] | None = None  # URL and version of the first answer
        self._fetching = asyncio.Lock()
        self._slots = asyncio.Semaphore(self.in_flight)

    async def fetch_info(self, ends: float) -> RewardInfo:
        """Return the servers' description of the reward, fetched once.

        Raises:
            Again, TimeoutError: when none answers before `ends`, of time.monotonic().
            RewardFailure: for servers without it, with other codecs or different versions.
        """
        async with asyncio.timeout(ends - time.monotonic()), self._fetching:
            if self._known is None:
                self._known = await _try_until(ends, self._ask_all)
        return self._known

    async def score(
        self, ids: list[str], images: np.ndarray, prompts: list[str], metadata: list[dict],
        ends: float,
    ) -> Answer:  # fmt: skip
        """Score images (b, H, W, 3) uint8; NaN and the reason where no server answers in time.

        Raises RewardFailure for what no retry mends.
        """
        try:
            async with asyncio.timeout(ends - time.monotonic()), self._slots:
                request = await asyncio.to_thread(self._pack, ids, images, prompts, metadata)
                return await _try_until(ends, functools.partial(self._try, request))
        except (Again, TimeoutError):
            return failed(len(ids), self.too_late())

    def too_late(self) -> str:
        return (
            f"no score within {self.deadline:g} s: {self.troubles()}; see that a server runs, "
            "look at its log, or raise executor.deadline"
        )

    def troubles(self) -> str:
        return "; ".join(f"{server.url} {server.trouble}" for server in self.servers)

    def infos(self) -> list[Info]:
        return [server.info for server in self.servers if server.info is not None]

    async def _ask_all(self) -> RewardInfo:
        asked = (self._ask_info(server) for server in self.servers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for error in answers:
            if isinstance(error, BaseException) and not isinstance(error, Again):
                raise error
        known = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not known:
            raise Again(self.troubles())
        return known[0]

    async def _ask_info(self, server: Server) -> RewardInfo:
        data = await self._send(server, "GET", "/v1/info")
        try:
            info = Info.model_validate_json(data)
        except ValidationError as error:
            raise self._refuse(
                server,
                f"does not speak protocol {PROTOCOL} of reward servers ({error_message(error)}); "
                "look at executor.urls",
            ) from error
        reward = next((reward for reward in info.rewards if reward.name == self.name), None)
        if reward is None:
            known = ", ".join(reward.name for reward in info.rewards) or "none"
            raise self._refuse(server, f"does not serve it; it serves {known}")
        if self.codec != "auto" and self.codec not in info.codecs:
            raise self._refuse(
                server,
                f"does not take images as {self.codec}; set executor.codec to one of "
                f"{', '.join(info.codecs)}",
            )
        self._check_version(server, reward.version)
        server.info, server.stale = info, False
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

    def chosen_codec(self) -> Codec:
        """Return the codec; for "auto" the cheapest that all servers take and that fits the way."""
        if self.codec != "auto":
            return self.codec
        near = all(is_loopback(server.url) for server in self.servers)
        best: tuple[Codec, ...] = ("raw",) if near else ()
        for codec in (*best, "webp-lossless", "raw-zlib"):
            if all(codec in info.codecs for info in self.infos()):
                return codec
        return "png"

    def _pack(
        self, ids: list[str], images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> _Request:
        multipart = all("multipart" in info.forms for info in self.infos())
        codec = self.chosen_codec()
        blobs = [encode(image, codec) for image in images]
        items: list[dict[str, Any]] = [
            {"id": name, "prompt": prompt, "metadata": data}
            | ({} if multipart else {"image": base64.b64encode(blob).decode()})
            for name, prompt, data, blob in zip(ids, prompts, metadata, blobs, strict=True)
        ]
        key = uuid.uuid4().hex
        head = {"protocol": PROTOCOL, "reward": self.name, "codec": codec}
        try:
            text = json.dumps(head | {"key": key, "items": items}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailure(
                f"reward {self.name!r} is on a server, and metadata travel as JSON: {error}"
            ) from error
        size = len(text) + sum(len(blob) + 200 for blob in blobs) * multipart
        most = max(info.max_body for info in self.infos())
        if size > most:
            raise RewardFailure(
                f"reward {self.name!r}: {len(items)} images are {size} bytes, and its server "
                f"takes {most}; lower executor.micro_batch, or raise --max-body there"
            )
        content: dict[str, Any] = {"content": text, "headers": {"Content-Type": "application/json"}}
        if multipart:
            binary = "application/octet-stream"
            parts = [("image", (str(n), blob, binary)) for n, blob in enumerate(blobs)]
            content = {"files": [("request", (None, text, "application/json")), *parts]}
        return _Request(ids=ids, key=key, content=content, size=size, multipart=multipart)

    async def _try(self, request: _Request) -> Answer:
        server = await self._pick(request)
        if server.stale:
            await self._ask_info(server)
            if not server.takes(request):
                raise Again(f"{server.url} {server.trouble}")
        try:
            data = await self._send(server, "POST", "/v1/score", **request.content)
        except TooLarge:
            before = server.info
            await self._ask_info(server)
            if server.info == before:  # it takes less than it says
                raise
            raise Again(f"{server.url} takes less than before") from None
        return self._read(server, request, data)

    def _read(self, server: Server, request: _Request, data: bytes) -> Answer:
        """Return the scores in a server's answer, or why it is invalid."""
        try:
            answer = self._parse(request, data)
        except ValueError as error:
            self._note_failure(server, str(error))
            advice = "look at its log, and compare it with docs/reward-servers.md"
            return failed(len(request.ids), f"{server.url} {error}; {advice}")
        server.failures, server.trouble = 0, "has not answered"
        self.heard = time.monotonic()
        self._check_version(server, answer.version)
        why = {row: result.error for row, result in enumerate(answer.results) if result.error}
        names = dict.fromkeys(name for result in answer.results for name in result.components)
        scores: Any = [result.score for result in answer.results]
        if names:
            scores = {n: [result.components.get(n) for result in answer.results] for n in names}
        found = read_answer((scores, why), len(answer.results))
        components = {n: self._at(server, part) for n, part in found.components.items()}
        return replace(self._at(server, found), components=components)

    def _at(self, server: Server, answer: Answer) -> Answer:
        """Return the answer with the server's name beside its reasons."""
        named = {row: f"{text} (at {server.url})" for row, text in answer.reasons.items()}
        return replace(answer, reasons=named)

    def _parse(self, request: _Request, data: bytes) -> Response:
        try:
            answer = Response.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(f"answered no JSON of scores ({error_message(error)})") from error
        ids = [result.id for result in answer.results]
        if len(ids) != len(request.ids):
            raise ValueError(f"answered with {len(ids)} results for {len(request.ids)} images")
        if ids != request.ids or answer.reward != self.name:
            raise ValueError("answered for other images than were sent")
        if answer.key != request.key:
            raise ValueError("answered another question, by its key")
        return answer

    async def _pick(self, request: _Request) -> Server:
        """Return the next server that does not rest. Raises Again when none takes the request."""
        for _ in self.servers:
            server = self.servers[self._next % len(self.servers)]
            self._next += 1
            if server.rests_until > time.monotonic() or not server.takes(request):
                continue
            if not server.suspect or await self._recovered(server):
                return server
        wake = min((s.rests_until for s in self.servers if s.takes(request)), default=0.0)
        raise Again(self.troubles(), after=max(0.0, wake - time.monotonic()))

    async def _recovered(self, server: Server) -> bool:
        server.rests_until = time.monotonic() + self._pause  # no other request need try meanwhile
        try:
            reply = await self.http.get(server.url + "/healthz", timeout=self._pause)
        except httpx.RequestError as error:
            server.trouble = self._describe(error)
            return False
        if reply.status_code != 200:
            server.trouble = f"answered {reply.status_code} when asked if it is ready"
            return False
        server.suspect, server.rests_until = False, 0.0
        server.failures = OPENS_AFTER - 1  # the next failure is enough
        return True

    async def _send(self, server: Server, method: str, path: str, **content: Any) -> bytes:
        """Return the body of a 200 answer to one try.

        Raises Again for what to retry, RewardFailure where the server refuses.
        """
        data = bytearray()
        try:
            async with self.http.stream(method, server.url + path, **content) as reply:
                async for chunk in reply.aiter_raw():
                    data += chunk
                    if len(data) > MAX_ANSWER:  # no answer of a reward
                        break
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self._note_failure(server, self._describe(error)) from error
        code = reply.status_code
        if code == 200:
            return bytes(data)
        status = f"answered {code} ({_refusal(bytes(data))})"
        if code in TRY_AGAIN or code >= 500:
            raise self._note_status(server, status, reply)
        kind = TooLarge if code == 413 else RewardFailure
        raise kind(f"reward {self.name!r}: {server.url} {status}{REMEDIES.get(code, '')}")

    def _note_failure(self, server: Server, trouble: str) -> Again:
        server.trouble = trouble
        server.failures, server.stale = server.failures + 1, True
        if server.failures >= OPENS_AFTER:
            server.suspect = True
            server.rests_until = time.monotonic() + self._pause
        return Again(f"{server.url} {trouble}")

    def _note_status(self, server: Server, status: str, reply: httpx.Response) -> Again:
        """A server that says when to come back is busy, not broken."""
        after = _retry_after(reply.headers.get("retry-after"))
        if after is None and reply.status_code >= 500:
            return self._note_failure(server, status)
        server.trouble = status if after is None else f"{status} and asks to wait {after:g} s"
        rest = min(after or 0.0, LONGEST_REST, self.deadline / 2)
        server.rests_until = time.monotonic() + rest
        # With several servers `_pick` takes another that is free.
        return Again(f"{server.url} {status}", after=0.0 if len(self.servers) > 1 else after or 0.0)

    def _describe(self, error: Exception) -> str:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return f"cannot be reached ({error or 'no connection in time'})"
        if isinstance(error, httpx.TimeoutException):
            return f"did not answer within {self.timeout:g} s"
        return f"broke off ({error})"


async def _try_until(ends: float, work: Callable[[], Awaitable[T]]) -> T:
    """Retry `work` after each Again with growing pauses, until `ends` of time.monotonic().

    Raises the last Again, or TimeoutError at `ends`.
    """

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(BACKOFF(state), error.after if isinstance(error, Again) else 0.0)

    async with asyncio.timeout(ends - time.monotonic()):
        retry = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Again),
            wait=pause,
            stop=tenacity.stop_before_delay(ends - time.monotonic()),
            reraise=True,
        )
        return await retry(work)


def _refusal(data: bytes) -> str:
    """Return the error sentence in a server's answer."""
    try:
        return Refusal.model_validate_json(data).error
    except ValidationError:
        return data[:200].decode("utf-8", "replace").strip() or "no words"


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None for neither."""
    if value is None:
        return None
    with suppress(ValueError):  # else it is a date
        seconds = float(value)
        return seconds if 0 <= seconds < math.inf else None
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None

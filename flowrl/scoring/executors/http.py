"""Asking a reward on HTTP servers: `flowrl reward-serve`, or any that speaks its protocol.

Whatever the servers do, an answer is there within `deadline` seconds of being asked for.
"""

import asyncio
import base64
import functools
import json
import math
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Any, TypeVar

import httpx
import numpy as np
import tenacity
from pydantic import ValidationError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.executors.base import (
    Answer,
    RewardFailure,
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
    complaint,
    encode,
    sendable,
)

# --- The servers that answer for one reward ----------------------------------------------------

CONNECT = 5.0  # seconds
OPENS_AFTER = 3  # failures in a row, after which a server rests and must say that it is ready
BACKOFF = tenacity.wait_exponential(multiplier=0.1, max=5.0) + tenacity.wait_random(0.0, 0.1)
LONGEST_REST = 30.0  # seconds; whoever asks for more is asked again all the same, in vain at worst
MAX_ANSWER = 16 * 2**20  # bytes
AGAIN = {408, 429}  # and 5xx: the only answers worth another try
REMEDIES = {
    401: "; name the variable with its token in executor.token_env",
    404: "; look at executor.urls",
    413: "; lower executor.micro_batch",
}

T = TypeVar("T")


class Again(Exception):
    """It did not work now; another try may. after: seconds to wait first, at least."""

    def __init__(self, sentence: str, after: float = 0.0):
        super().__init__(sentence)
        self.after = after


class TooLarge(RewardFailure):
    """A server refuses a question for its size: 413."""


@dataclass(slots=True, kw_only=True)
class Server:
    """One address, and what is known of it. suspect: it must answer /healthz before it is used.

    info: what it said of itself last; stale: it has failed since or said nothing yet, so that it
    may be another by now, and must say it before it is used.
    """

    url: str
    failures: int = 0
    suspect: bool = False
    rests_until: float = 0.0
    info: Info | None = None
    stale: bool = True
    trouble: str = "has not answered"


class Servers:
    """Asks servers in turn; one that fails is left alone for `pause` seconds."""

    def __init__(
        self,
        reward: str,
        urls: Sequence[str],
        *,
        timeout: float,
        deadline: float,
        token: str | None,
    ):
        self.reward, self.pause = reward, min(timeout, CONNECT)
        self._longest_rest = min(LONGEST_REST, deadline / 2)
        self.all = [Server(url=url.rstrip("/")) for url in urls]
        headers = {"Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        # Proxies of the environment are not for servers next door: many answer 503 for localhost.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT), pool=None),
            trust_env=False,
        )
        self._timeout = timeout
        self._next = 0
        self.heard = -math.inf  # when a server last gave scores

    async def close(self) -> None:
        await self._client.aclose()

    async def pick(self, suits: Callable[[Server], bool]) -> Server:
        """The next server that does not rest. Raises Again when all that suit do."""
        for _ in self.all:
            server = self.all[self._next % len(self.all)]
            self._next += 1
            if server.rests_until > time.monotonic() or not suits(server):
                continue
            if not server.suspect or await self._recovered(server):
                return server
        wake = min((s.rests_until for s in self.all if suits(s)), default=0.0)
        raise Again(self.troubles(), after=max(0.0, wake - time.monotonic()))

    async def ask(self, server: Server, method: str, path: str, **body: Any) -> bytes:
        """One try: the body of a 200 answer.

        Raises Again where another try may help, RewardFailure where the server refuses.
        """
        try:
            async with self._client.stream(method, server.url + path, **body) as reply:
                data = await _read(reply)
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self.note_failure(server, self._what(error)) from error
        if reply.status_code == 200:
            return data
        status = f"answered {reply.status_code} ({_sentence(data)})"
        if reply.status_code in AGAIN or reply.status_code >= 500:
            raise self._later(server, status, reply)
        remedy = REMEDIES.get(reply.status_code, "")
        kind = TooLarge if reply.status_code == 413 else RewardFailure
        raise kind(f"reward {self.reward!r}: {server.url} {status}{remedy}")

    def note_failure(self, server: Server, trouble: str) -> Again:
        """Takes note of a failure, for `raise`."""
        server.trouble = trouble
        server.failures += 1
        server.stale = True
        if server.failures >= OPENS_AFTER:
            server.suspect = True
            server.rests_until = time.monotonic() + self.pause
        return Again(f"{server.url} {trouble}")

    def answered(self, server: Server) -> None:
        server.failures, server.trouble = 0, "has not answered"
        self.heard = time.monotonic()

    def troubles(self) -> str:
        return "; ".join(f"{server.url} {server.trouble}" for server in self.all)

    def _later(self, server: Server, status: str, reply: httpx.Response) -> Again:
        """A server that says when to come back is busy, not broken."""
        after = _retry_after(reply.headers.get("retry-after"))
        if after is None and reply.status_code >= 500:
            return self.note_failure(server, status)
        server.trouble = status if after is None else f"{status} and asks to wait {after:g} s"
        server.rests_until = time.monotonic() + min(after or 0.0, self._longest_rest)
        # Another server may be free, `pick` knows.
        return Again(f"{server.url} {status}", after=0.0 if len(self.all) > 1 else after or 0.0)

    async def _recovered(self, server: Server) -> bool:
        server.rests_until = time.monotonic() + self.pause  # nobody else need try meanwhile
        try:
            reply = await self._client.get(server.url + "/healthz", timeout=self.pause)
        except httpx.RequestError as error:
            server.trouble = self._what(error)
            return False
        if reply.status_code != 200:
            server.trouble = f"answered {reply.status_code} when asked if it is ready"
            return False
        server.suspect, server.rests_until = False, 0.0
        server.failures = OPENS_AFTER - 1  # the next failure is enough
        return True

    def _what(self, error: Exception) -> str:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return f"cannot be reached ({error or 'no connection in time'})"
        if isinstance(error, httpx.TimeoutException):
            return f"did not answer within {self._timeout:g} s"
        return f"broke off ({error})"


async def again_until(ends: float, work: Callable[[], Awaitable[T]]) -> T:
    """Does `work`, again after each Again with growing pauses, as long as `ends` allows.

    ends: on the running loop's clock. Raises the last Again, or TimeoutError at `ends`.
    """
    clock = asyncio.get_running_loop().time

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(BACKOFF(state), error.after if isinstance(error, Again) else 0.0)

    async with asyncio.timeout_at(ends):
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Again),
            wait=pause,
            stop=lambda state: clock() + state.upcoming_sleep >= ends,
            reraise=True,
        ):
            with attempt:
                return await work()
    raise AssertionError("a try either returns or raises")


async def _read(reply: httpx.Response) -> bytes:
    """The body as sent, up to a limit: what is longer is no answer of a reward."""
    data = bytearray()
    async for chunk in reply.aiter_raw():
        data += chunk
        if len(data) > MAX_ANSWER:
            break
    return bytes(data)


def _sentence(data: bytes) -> str:
    """What a server says is wrong."""
    try:
        return Refusal.model_validate_json(data).error
    except ValidationError:
        return data[:200].decode("utf-8", "replace").strip() or "no words"


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date; None for neither."""
    if value is None:
        return None
    with suppress(ValueError):  # else it is a date
        seconds = float(value)
        return seconds if 0 <= seconds < math.inf else None
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


# --- The client's side of the protocol of docs/reward-servers.md, for one reward ---------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Images (b, H, W, 3) uint8 that are judged together, and the names they go by.

    key: the same in every try, so that none counts twice.
    """

    ids: list[str]
    images: np.ndarray
    prompts: list[str]
    metadata: list[dict]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A question as it travels. sent: arguments for httpx; size: bytes, at most."""

    sent: dict[str, Any]
    size: int
    multipart: bool


class Client:
    """Fetches what servers say of a reward, and asks it. To be used in one event loop only."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        timeout: float,
        deadline: float,
        codec: Codec,
        token: str | None,
        in_flight: int,
    ):
        self.name, self.deadline = name, deadline
        self.codec: Codec = codec
        self.servers = Servers(name, urls, timeout=timeout, deadline=deadline, token=token)
        self.said: RewardInfo | None = None
        self._version: tuple[str, str] | None = None  # and who said so first
        self._fetching = asyncio.Lock()
        self._slots = asyncio.Semaphore(in_flight)

    @property
    def batches(self) -> list[int]:
        """The most images that each server takes; of those that have said it, so after
        `fetch_info` at least one."""
        return [info.max_batch for info in self._infos()]

    async def fetch_info(self, ends: float) -> RewardInfo:
        """What the servers say of the reward; asked once. Raises as `again_until` does, and
        RewardFailure for servers without it, with another codec or with different versions."""
        async with asyncio.timeout_at(ends), self._fetching:
            if self.said is None:
                self.said = await again_until(ends, self._ask_all)
        return self.said

    async def score(self, question: PreparedRequest, ends: float) -> Answer:
        """Scores, or NaN for all images and why. Raises RewardFailure for what no try mends."""
        try:
            async with asyncio.timeout_at(ends), self._slots:
                body = await asyncio.to_thread(self._body, question)
                return await again_until(ends, functools.partial(self._try, question, body))
        except (Again, TimeoutError):
            return failed(len(question.ids), self.too_late())

    def too_late(self) -> str:
        return (
            f"no score within {self.deadline:g} s: {self.servers.troubles()}; see that a server "
            "runs, look at its log, or raise executor.deadline"
        )

    async def _ask_all(self) -> RewardInfo:
        asked = (self._ask_info(server) for server in self.servers.all)
        told = await asyncio.gather(*asked, return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException) and not isinstance(error, Again):
                raise error
        known = [said for said in told if not isinstance(said, BaseException)]
        if not known:
            raise Again(self.servers.troubles())
        return known[0]

    def _infos(self) -> list[Info]:
        return [server.info for server in self.servers.all if server.info is not None]

    async def _ask_info(self, server: Server) -> RewardInfo:
        data = await self.servers.ask(server, "GET", "/v1/info")
        try:
            info = Info.model_validate_json(data)
        except ValidationError as error:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not speak protocol {PROTOCOL} of reward "
                f"servers ({complaint(error)}); look at executor.urls"
            ) from error
        said = next((reward for reward in info.rewards if reward.name == self.name), None)
        if said is None:
            known = ", ".join(reward.name for reward in info.rewards) or "none"
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not serve it; it serves {known}"
            )
        if self.codec not in info.codecs:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not take images as {self.codec}; set "
                f"executor.codec to one of {', '.join(info.codecs)}"
            )
        self._check_version(server, said.version)
        server.info, server.stale = info, False
        return said

    def _check_version(self, server: Server, version: str) -> None:
        url, first = self._version = self._version or (server.url, version)
        if version != first:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} has version {version!r}, and {url} had "
                f"{first!r} in this run; their scores do not compare: serve one version"
            )

    def _body(self, question: PreparedRequest) -> _Body:
        multipart = all("multipart" in info.forms for info in self._infos())
        items: list[dict[str, Any]] = [
            {"id": name, "prompt": prompt, "metadata": metadata}
            for name, prompt, metadata in zip(
                question.ids, question.prompts, question.metadata, strict=True
            )
        ]
        blobs = [encode(image, self.codec) for image in question.images]
        if not multipart:
            for item, blob in zip(items, blobs, strict=True):
                item["image"] = base64.b64encode(blob).decode()
        head = {"protocol": PROTOCOL, "reward": self.name, "codec": self.codec}
        try:
            text = json.dumps(
                head | {"key": question.key, "items": items}, allow_nan=False
            ).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailure(
                f"reward {self.name!r} is on a server, and metadata travel as JSON: {error}"
            ) from error
        size = len(text) + sum(len(blob) + 200 for blob in blobs) * multipart
        most = max(info.max_body for info in self._infos())
        if size > most:
            raise RewardFailure(
                f"reward {self.name!r}: {len(items)} images are {size} bytes, and its server "
                f"takes {most}; lower executor.micro_batch, or raise --max-body there"
            )
        if not multipart:
            sent = {"content": text, "headers": {"Content-Type": "application/json"}}
            return _Body(sent=sent, size=size, multipart=False)
        binary = "application/octet-stream"
        parts = [("image", (str(n), blob, binary)) for n, blob in enumerate(blobs)]
        sent = {"files": [("request", (None, text, "application/json")), *parts]}
        return _Body(sent=sent, size=size, multipart=True)

    async def _try(self, question: PreparedRequest, body: _Body) -> Answer:
        suits = functools.partial(_suits, len(question.ids), body)
        server = await self.servers.pick(suits)
        if server.stale:
            await self._ask_info(server)
            if not suits(server):
                raise Again(f"{server.url} {server.trouble}")
        try:
            data = await self.servers.ask(server, "POST", "/v1/score", **body.sent)
        except TooLarge:
            before = server.info
            await self._ask_info(server)
            if server.info == before:  # it takes less than it says
                raise
            raise Again(f"{server.url} takes less than before") from None
        try:
            answer = Response.model_validate_json(data)
        except ValidationError as error:
            return self._useless(
                server, question, f"answered no JSON of scores ({complaint(error)})"
            )
        ids = [result.id for result in answer.results]
        if len(ids) != len(question.ids):
            sizes = f"{len(ids)} results for {len(question.ids)} images"
            return self._useless(server, question, f"answered with {sizes}")
        if ids != question.ids or answer.reward != self.name:
            return self._useless(server, question, "answered for other images than were sent")
        if answer.key != question.key:
            return self._useless(server, question, "answered another question, by its key")
        self.servers.answered(server)
        self._check_version(server, answer.version)
        why = {row: result.error for row, result in enumerate(answer.results) if result.error}
        scores = [math.nan if r.score is None else r.score for r in answer.results]
        values, reasons = read_answer((scores, why), len(ids))
        named = {row: f"{text} (at {server.url})" for row, text in reasons.items()}
        return Answer(scores=values, reasons=named)

    def _useless(self, server: Server, question: PreparedRequest, what: str) -> Answer:
        self.servers.note_failure(server, what)
        reason = f"{server.url} {what}; look at its log, and compare it with docs/reward-servers.md"
        return failed(len(question.ids), reason)


def _suits(count: int, body: _Body, server: Server) -> bool:
    """Whether a server takes `count` images in this form, as far as is known of it."""
    info = server.info
    if info is None or server.stale:
        return True
    if count > info.max_batch:
        server.trouble = f"takes {info.max_batch} images at a time, not {count}"
    elif body.size > info.max_body:
        server.trouble = f"takes {info.max_body} bytes at a time, not {body.size}"
    elif body.multipart and "multipart" not in info.forms:
        server.trouble = "takes no multipart/form-data"
    else:
        return True
    return False


# --- An event loop in a thread of its own ------------------------------------------------------


class EventLoop:
    """Runs coroutines until it is closed. `start` may be called from any other thread."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancels what still runs, does `last`, and ends the thread."""
        self.start(self._end(last)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last
        await self._loop.shutdown_default_executor()


# --- Asking a reward on HTTP servers: `flowrl reward-serve`, or any that speaks its protocol ---

LONGEST = 600.0  # seconds of rest


@dataclass(frozen=True, slots=True)
class _Open:
    """What a Remote has while it is in use."""

    loop: EventLoop
    client: Client


class _Rest:
    """Servers that were silent for a whole deadline twice in a row are left alone, longer each
    time: one that is dead must not cost a deadline at every batch of a run that can do without."""

    def __init__(self, deadline: float):
        self._deadline, self._silences, self._until, self._noted = deadline, 0, 0.0, 0.0

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._until - time.monotonic())

    def note(self, *, heard: bool, began: float) -> None:
        """How what was asked at `began` ended; what was asked at the same time counts once."""
        now = time.monotonic()
        if heard:
            self._silences, self._until = 0, 0.0
        elif began >= self._noted:
            self._silences, self._noted = self._silences + 1, now
            if self._silences > 1:
                self._until = now + min(LONGEST, self._deadline * 2 ** (self._silences - 2))


class HTTPExecutor:
    """The reward `name` of the servers at `urls`, as executor and as reward.

    It keeps to at most `in_flight` requests of at most `micro_batch` images (None: never split;
    groups of a reward that compares them never are). timeout: seconds without a byte, after which
    a request is tried again; deadline: seconds for all tries of one `submit`, its time in the
    queue included. When all servers were silent for that long twice, they are left alone a while.
    token: the servers' bearer token.

    version, bounds, scope, required_metadata and deterministic are asked for at first use, and
    raise RewardFailure when no server says them in time. Raises UserError for addresses, limits,
    codecs and tokens that cannot be.
    """

    differentiable = False

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        timeout: float = 30.0,
        deadline: float = 120.0,
        micro_batch: int | None = 16,
        in_flight: int = 4,
        codec: Codec = "png",
        token: str | None = None,
    ):
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise UserError(f"reward {name!r}: got urls {list(urls)}; expected http://HOST:PORT")
        if codec not in CODECS:
            raise UserError(f"reward {name!r}: codec is one of {', '.join(CODECS)}, not {codec!r}")
        limits = {"timeout": timeout, "deadline": deadline, "in_flight": in_flight}
        for option, value in (limits | {"micro_batch": micro_batch}).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"reward {name!r}: {option} is {value}, expected a finite number more than 0"
                )
        if token and not sendable(token):
            raise UserError(f"reward {name!r}: its token {TOKEN_RULE}")
        self.name, self.deadline, self.micro_batch = name, deadline, micro_batch
        self._urls, self._timeout, self._token = list(urls), timeout, token
        self._codec: Codec = codec
        self._in_flight = in_flight
        self._opening = Lock()
        self._open: _Open | None = None
        self._said: RewardInfo | None = None
        self._rest = _Rest(deadline)

    @property
    def version(self) -> str:
        return self._info().version

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        return self._info().bounds

    @property
    def scope(self) -> str:
        return self._info().scope

    @property
    def required_metadata(self) -> tuple[str, ...]:
        return tuple(self._info().required_metadata)

    @property
    def deterministic(self) -> bool:
        return self._info().deterministic

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        answer = self.submit(images, prompts, metadata).result()
        return answer.scores, dict(answer.reasons)

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        if len(images) and not images.isfinite().all():
            future: Future[Answer] = Future()
            future.set_result(failed(len(images), "images hold NaN or infinite pixels"))
            return future
        levels = to_levels(images).permute(0, 2, 3, 1).contiguous().numpy()
        opened = self._opened()
        return opened.loop.start(self._answer(opened, levels, prompts, metadata))

    def close(self) -> None:
        """Ends all threads; what was not answered is cancelled."""
        with self._opening:
            opened, self._open = self._open, None
        if opened is not None:
            opened.loop.close(opened.client.servers.close())

    def _opened(self) -> _Open:
        """Threads and connections begin at first use: the constructor costs nothing."""
        with self._opening:
            if self._open is None:
                client = Client(
                    self.name,
                    self._urls,
                    timeout=self._timeout,
                    deadline=self.deadline,
                    codec=self._codec,
                    token=self._token,
                    in_flight=self._in_flight,
                )
                self._open = _Open(EventLoop(f"reward {self.name}"), client)
            return self._open

    def _info(self) -> RewardInfo:
        """Raises RewardFailure when no server tells anything."""
        if self._said is None:
            opened = self._opened()
            if left := self._rest.left():
                raise RewardFailure(f"reward {self.name!r}: {self._rest_reason(opened, left)}")
            began = time.monotonic()
            try:
                self._said = opened.loop.start(self._fetch(opened)).result()
            except (Again, TimeoutError) as error:
                self._rest.note(heard=False, began=began)
                reason = opened.client.too_late()
                raise RewardFailure(f"reward {self.name!r}: {reason}") from error
        return self._said

    async def _fetch(self, opened: _Open) -> RewardInfo:
        return await opened.client.fetch_info(asyncio.get_running_loop().time() + self.deadline)

    def _rest_reason(self, opened: _Open, left: float) -> str:
        return (
            f"not asked, since no server answered within {self.deadline:g} s before; the next try "
            f"is in {left:.0f} s: {opened.client.servers.troubles()}"
        )

    async def _answer(
        self, opened: _Open, images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> Answer:
        began = time.monotonic()
        if left := self._rest.left():
            return failed(len(prompts), self._rest_reason(opened, left))
        parts = await self._parts(opened, images, prompts, metadata)
        if prompts:
            heard = opened.client.servers.heard >= began
            self._rest.note(heard=heard, began=began)
        return joined(parts, time.monotonic() - began)

    async def _parts(
        self, opened: _Open, images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> list[Answer]:
        ends, count = asyncio.get_running_loop().time() + self.deadline, len(prompts)
        try:
            said = await opened.client.fetch_info(ends)
        except (Again, TimeoutError):
            return [failed(count, opened.client.too_late())]
        size = self._size(said, opened.client.batches, count)
        tasks = [
            asyncio.create_task(opened.client.score(question, ends))
            for question in _split(images, prompts, metadata, size)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _size(self, said: RewardInfo, batches: list[int], count: int) -> int:
        """Images in one request: every server takes them, or of whole groups one of them."""
        if said.scope == "sample" and self.micro_batch is not None:
            return min(self.micro_batch, *batches)
        most = max(batches)
        if count > most:
            raise RewardFailure(
                f"reward {self.name!r}: {count} images must not be split, and its server takes "
                f"{most} at a time; raise --max-batch there, or lower rollout.group_size"
            )
        return max(count, 1)


def _split(
    images: np.ndarray, prompts: list[str], metadata: list[dict], size: int
) -> Iterator[PreparedRequest]:
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        yield PreparedRequest(
            ids=[str(row) for row in range(len(prompts))[rows]],
            images=images[rows],
            prompts=prompts[rows],
            metadata=metadata[rows],
        )

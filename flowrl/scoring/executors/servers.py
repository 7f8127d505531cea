"""The servers that answer for one reward: which is asked next, which rests, what is asked again."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import tenacity
from pydantic import ValidationError

from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.protocol import Info, Refusal

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

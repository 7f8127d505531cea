"""What a reward server lets in: bytes, uploads, connections, and whose turn it is."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

HEADER_TIMEOUT_S = 10.0  # from the first byte of a request, or of a connection, to its last header
CONNECTIONS = 64  # of one address
T = TypeVar("T")


class ByteBudget:
    """At most `most` bytes held at a time; who wants more waits, in the order of asking."""

    def __init__(self, most: int):
        self.most, self.held = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes inside; more than there are at all counts as all."""
        size = min(size, self.most)
        await self._take(size)
        try:
            yield
        finally:
            self.held -= size
            self._wake()

    async def _take(self, size: int) -> None:
        if not self._waiting and self.held + size <= self.most:
            self.held += size
            return
        mine = (size, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            await mine[1]
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:  # it was given, and is not wanted any more
                self.held -= size
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self.held + self._waiting[0][0] <= self.most:
            size, future = self._waiting.popleft()
            self.held += size
            future.set_result(None)


class Turns(Generic[T]):
    """A queue that serves its clients in turn, however much each of them has asked."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()
        self._there = asyncio.Event()

    def put(self, client: str, item: T) -> None:
        self._queues.setdefault(client, deque()).append(item)
        self._there.set()

    async def get(self) -> T:
        """Return the first item of the client who waits longest for a turn."""
        while not self._queues:
            self._there.clear()
            await self._there.wait()
        client, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue  # behind all others
        return item

    def get_now(self) -> T | None:
        """Return the next item if there is one."""
        if not self._queues:
            return None
        client, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return item

    def drop(self, client: str, item: T) -> None:
        """Take an item out that still waits."""
        queue = self._queues.get(client, deque())
        if item in queue:
            queue.remove(item)
        if not queue:
            self._queues.pop(client, None)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


class ConnectionLimit:
    """The connections of each address, and how long headers may take.

    One beyond the limit ends the oldest of its address whose headers are not complete; where all
    are, it is refused itself.
    """

    def __init__(self, most: int = CONNECTIONS, header_timeout: float = HEADER_TIMEOUT_S):
        self.most, self.header_timeout = most, header_timeout
        self._open: dict[str, OrderedDict[Any, None]] = {}

    def admit(self, address: str, connection: "_Guarded") -> bool:
        """Return whether a connection may stay."""
        others = self._open.setdefault(address, OrderedDict())
        if len(others) >= self.most:
            half_open = next((other for other in others if other.reads_headers), None)
            if half_open is None:
                return False
            others.pop(half_open)
            half_open.transport.abort()
        others[connection] = None
        return True

    def forget(self, address: str, connection: "_Guarded") -> None:
        others = self._open.get(address, OrderedDict())
        others.pop(connection, None)
        if not others:
            self._open.pop(address, None)


class _Guarded:
    """In front of a protocol of uvicorn: watches the time of headers."""

    limit: ConnectionLimit
    transport: Any
    cycle: Any  # the request that is answered, or was last
    _timer: asyncio.TimerHandle | None = None
    _address = ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if self.limit.admit(self._address, self):
            self._watch()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.limit.forget(self._address, self)
        super().connection_lost(exc)  # type: ignore[misc]

    @property
    def reads_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """From the first byte of headers on, not from the last."""
        if not self.reads_headers:
            self._stop()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.limit.header_timeout, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.reads_headers:
            self.transport.abort()


def guarded_http(
    connections: int = CONNECTIONS, header_timeout: float = HEADER_TIMEOUT_S
) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with limits on the connections of an address and on headers."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    limit = ConnectionLimit(connections, header_timeout)
    return type("Guarded", (_Guarded, AutoHTTPProtocol), {"limit": limit})


class Pace:
    """The least speed of an upload: `grace` seconds, and then `rate` bytes a second on average."""

    def __init__(self, grace: float, rate: float):
        self._ends, self._rate = time.monotonic() + grace, rate

    def left(self, size: int) -> float:
        """Return the seconds that an upload of which `size` bytes are there may still take."""
        return self._ends + size / self._rate - time.monotonic()

"""Limit a server's connections: how many of one address, and how long their headers may take."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

CONNECTIONS = 64  # of one address
HEADER_TIMEOUT_S = 10.0  # from a connection's or request's first byte to its last header
KEEP_ALIVE_S = 5  # an idle connection is closed
LINGER_S = 10.0  # a refused client may read its answer


def make_server(
    app: Any,
    *,
    connections: int = CONNECTIONS,
    header_timeout: float = HEADER_TIMEOUT_S,
    shutdown_timeout: int = 1,
) -> "uvicorn.Server":
    """Return a server; `run(sockets=[listening])` serves until Ctrl-C.

    Args:
        app: an ASGI application.
        connections: of one address at a time.
        header_timeout: seconds that the headers of a request may take.
        shutdown_timeout: seconds that open requests have at the end.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    limits = {"most": connections, "header_timeout": header_timeout, "counts": Counter()}
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=shutdown_timeout,
        http=type("LimitedProtocol", (_LimitedProtocol, AutoHTTPProtocol), limits),
    )  # fmt: skip
    return uvicorn.Server(config)


class _LimitedProtocol:
    """Mixin before a protocol of uvicorn."""

    transport: Any
    cycle: Any  # the request that is answered, or was last
    most: int
    header_timeout: float
    counts: Counter[str]  # open connections of each address, of all connections of a server

    _address = ""
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self.counts[self._address] += 1
        self._refused = self.counts[self._address] > self.most
        if self._refused:
            self._refuse()
        else:
            self._watch_headers()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)  # type: ignore[misc]
            self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.counts[self._address] -= 1
        if not self.counts[self._address]:
            del self.counts[self._address]
        super().connection_lost(exc)  # type: ignore[misc]

    def _refuse(self) -> None:
        """Answer 503. A close at once would reset the connection before the client reads it."""
        if self.counts[self._address] > 5 * self.most:  # too many that still read their answers
            return self.transport.abort()
        text = f'{{"error": "at most {self.most} connections of one address"}}'
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_timer(LINGER_S)

    # --- headers: the time from their first byte is limited, not that from the last ---------------

    def _reads_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch_headers(self) -> None:
        if not self._reads_headers():
            self._stop_timer()
        elif self._timer is None:
            self._start_timer(self.header_timeout)

    def _start_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._refused or self._reads_headers():
            self.transport.abort()

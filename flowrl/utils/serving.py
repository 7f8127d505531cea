"""Guard the servers of `ui`, `vote` and `reward-serve`: addresses, tokens, hosts, connections.

A server listens on loopback unless it is told another address, and then it needs a token. `Guard`
refuses a request before its body is read: for an unknown Host (a page of another site whose name
leads to this machine, as in DNS rebinding), from another Origin, or without its token.
`make_server` limits the connections of each address and the time that their headers may take.
"""

import asyncio
import hmac
import ipaddress
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.errors import UserError
from flowrl.utils.untrusted import parse_json

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

CONNECTIONS = 64  # of one address
HEADER_TIMEOUT_S = 10.0  # from a connection's or request's first byte to its last header
KEEP_ALIVE_S = 5  # an idle connection is closed
LINGER_S = 10.0  # a refused client may read its answer
PATIENCE_S = 1.0  # of a connection that has sent nothing yet, when others want its place
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN_RULE = "must be of visible ASCII characters, without spaces: it travels in an HTTP header"


# --- addresses and tokens ------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(host: str, variable: str | None) -> str | None:
    """Return the token in an environment variable, None without a variable.

    Raises UserError for a missing variable, a token that no HTTP header can hold, and an address
    that other machines reach without a token.
    """
    if variable is None:
        if is_loopback(host):
            return None
        raise UserError(
            f"--host {host} lets other machines in: name the variable with a token that they must "
            "send, as in --token-env TOKEN."
        )
    token = os.environ.get(variable)
    if not token:
        raise UserError(f"--token-env names {variable}, and the environment has no such variable.")
    check_token(token)
    return token


def check_token(token: str) -> None:
    """Raise UserError for a token that no HTTP header can hold."""
    if not all("!" <= character <= "~" for character in token):
        raise UserError(f"the server's token {TOKEN_RULE}")


def bind(host: str, port: int) -> socket.socket:
    """Bind an address that clients reach after `listen`. Raises UserError when it is not free."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would let two servers listen
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UserError(f"Cannot listen at {host} port {port}: {error}.") from error
    return made


def listen(listening: socket.socket) -> None:
    """Let clients in. Raises UserError when another server was faster."""
    try:
        listening.listen()
    except OSError as error:
        host, port = listening.getsockname()[:2]
        raise UserError(f"Cannot listen at {host} port {port}: {error}.") from error


def url_host(host: str) -> str:
    """Return the host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def server_names(host: str, address: str) -> tuple[str, list[str]]:
    """Return the name to print for a server, and all names that clients may send as Host.

    Args:
        host: as the user wrote it.
        address: that the socket is bound to; 0.0.0.0 and :: are all addresses of this machine.
    """
    if not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return host, [*LOOPBACK, host.lower(), address]
    return _outgoing_address(address), [*LOOPBACK, *_machine_names()]


def _machine_names() -> list[str]:
    """Return the addresses of this machine, its name, and the name's addresses."""
    import psutil

    cards = psutil.net_if_addrs().values()
    internet = (socket.AF_INET, socket.AF_INET6)
    names = [address.address for card in cards for address in card if address.family in internet]
    name = socket.gethostname()
    with suppress(OSError):  # a name without an address
        for *_, full, address in socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME):
            names += [full, str(address[0])]
    names += [name, _outgoing_address("0.0.0.0"), _outgoing_address("::")]
    return sorted({name.partition("%")[0].lower() for name in names if name})


def _outgoing_address(wildcard: str) -> str:
    """Return this machine's address on its route to others, loopback where it has none.

    Connecting a socket for datagrams only chooses the route: nothing is sent.
    """
    six = ":" in wildcard
    remote = "2001:db8::1" if six else "192.0.2.1"  # reserved for documentation
    with (
        suppress(OSError),  # no route
        socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as route,
    ):
        route.connect((remote, 9))
        return str(route.getsockname()[0])
    return "::1" if six else "127.0.0.1"


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets, in lower case."""
    name, _, port = host.rpartition(":")
    has_port = bool(name) and port.isdigit() and not name.endswith(":")
    return (name if has_port else host).strip("[]").lower()


def check_names(names: Sequence[str]) -> list[str]:
    """Return the names of --allow-host in lower case. Raises UserError for what is no name."""
    for name in names:
        if not name or name.strip() != name or "/" in name or host_name(name) != name.lower():
            raise UserError(
                f"--allow-host {name!r} is no name of a machine: leave out http:// and the port, "
                "as in box.example.com."
            )
    return [name.lower() for name in names]


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which requests a server answers."""

    server: str  # the command, for error messages
    hosts: frozenset[str] | None  # names that Host may have; None for any, which needs a token
    token: str | None  # None for a server that only this machine reaches
    private: str  # prefix of the paths that need the token
    max_body: int | None = None  # bytes; the Content-Length is then required
    json_only: bool = False  # bodies must be application/json, which no form of a page can send
    headers: Mapping[str, str] = field(default_factory=dict)  # added to every answer

    def refusal(self, scope: "Scope") -> tuple[int, str] | None:
        """Return the status and the sentence for a request that is refused."""
        header = {name.decode("latin-1"): value for name, value in scope["headers"]}
        host = header.get("host", b"").decode("latin-1")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return 421, f"use the address that {self.server} printed"
        # A browser adds Origin to what a page of another site sends; other programs send none.
        origin = header.get("origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != host:
            return 403, "this request comes from a page of another site"
        if not scope["path"].startswith(self.private):
            return None
        if self.token is not None:
            wanted = f"Bearer {self.token}".encode()
            if not hmac.compare_digest(header.get("authorization", b""), wanted):
                return 401, (
                    f"{self.server} needs its token: open the address that it printed, or send "
                    "the header Authorization: Bearer TOKEN"
                )
        if scope["method"] in ("GET", "HEAD"):
            return None
        kind = header.get("content-type", b"").partition(b";")[0].strip().lower()
        if self.json_only and kind != b"application/json":
            return 415, "expected application/json"
        size = header.get("content-length", b"")
        if self.max_body is not None and not (size.isdigit() and int(size) <= self.max_body):
            return 413, f"expected a body of at most {self.max_body} bytes, with its length"
        return None


class Guard:
    """ASGI middleware that refuses requests before their body is read."""

    def __init__(self, app: "ASGIApp", access: Access):
        self.app, self.access = app, access
        self._headers = [(n.lower().encode(), v.encode()) for n, v in access.headers.items()]

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.responses import JSONResponse

        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            raise RuntimeError("this server has no websockets")

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        refusal = self.access.refusal(scope)
        answer = self.app if refusal is None else JSONResponse({"error": refusal[1]}, refusal[0])
        await answer(scope, receive, send_with_headers)


async def json_body(request: "Request") -> Any:
    """Return the JSON of a request. Raises UserError for anything else, and for deep nesting."""
    return parse_json(await request.body(), "the request")


# --- connections ---------------------------------------------------------------------------------


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

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=shutdown_timeout,
        http=limited_protocol(connections, header_timeout),
    )  # fmt: skip
    return uvicorn.Server(config)


def limited_protocol(
    connections: int = CONNECTIONS, header_timeout: float = HEADER_TIMEOUT_S
) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on connections and on the time of headers."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    limits = ConnectionLimits(connections, header_timeout)
    return type("LimitedProtocol", (_LimitedProtocol, AutoHTTPProtocol), {"limits": limits})


class ConnectionLimits:
    """The open connections of each address.

    One beyond the limit ends the oldest connection of its address that has waited for headers for
    more than `PATIENCE_S`. Where there is none, the new one gets a 503.
    """

    def __init__(self, per_address: int, header_timeout: float):
        self.per_address, self.header_timeout = per_address, header_timeout
        self.refused = 0  # refused connections that still read their answer
        self._open: dict[str, OrderedDict[Any, None]] = {}

    def admit(self, address: str, connection: "_LimitedProtocol") -> bool:
        """Return whether a connection may stay."""
        admitted = self._open.setdefault(address, OrderedDict())
        if len(admitted) >= self.per_address:
            old = time.monotonic() - PATIENCE_S
            half_open = next((one for one in admitted if one.reads_headers_since < old), None)
            if half_open is None:
                return False
            admitted.pop(half_open)
            half_open.transport.abort()
        admitted[connection] = None
        return True

    def forget(self, address: str, connection: "_LimitedProtocol") -> None:
        admitted = self._open.get(address, OrderedDict())
        admitted.pop(connection, None)
        if not admitted:
            self._open.pop(address, None)


class _LimitedProtocol:
    """Mixin before a protocol of uvicorn."""

    limits: ConnectionLimits
    transport: Any
    cycle: Any  # the request that is answered, or was last
    _timer: asyncio.TimerHandle | None = None
    _since = math.inf
    _address = ""
    _refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if self.limits.admit(self._address, self):
            self._watch_headers()
        else:
            self._refuse(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)  # type: ignore[misc]
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.limits.forget(self._address, self)
        self.limits.refused -= self._refused
        super().connection_lost(exc)  # type: ignore[misc]

    @property
    def reads_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def reads_headers_since(self) -> float:
        """When it began to wait for headers, of time.monotonic(); infinity while it does not."""
        return self._since if self.reads_headers else math.inf

    def _refuse(self, transport: Any) -> None:
        """Answer 503. A close at once would reset the connection before the client reads it."""
        self._refused = True
        self.limits.refused += 1
        if self.limits.refused > 4 * self.limits.per_address:
            return transport.abort()
        text = f'{{"error": "at most {self.limits.per_address} connections of one address"}}'
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def _watch_headers(self) -> None:
        """Limit the time from the first byte of headers, not from the last."""
        if not self.reads_headers:
            self._stop_timer()
        elif self._timer is None:
            self._since = time.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.limits.header_timeout, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.reads_headers:
            self.transport.abort()

"""Guard the servers of `ui`, `vote` and `reward-serve`: addresses, tokens, hosts, connections.

A server listens on loopback unless it gets another address, and then it needs a token. `Guard`
refuses a request before its body is read: for an unknown Host (a page of another site whose name
leads to this machine, as in DNS rebinding), from another Origin, or without its token.
"""

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.errors import UserError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

CONNECTIONS = 256
LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
    return token_of(variable, "--token-env")


def token_of(variable: str | None, option: str) -> str | None:
    """Return the token in the environment variable that `option` names, None without a variable.

    Raises UserError for a missing variable, and a token that no HTTP header can hold.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or not all("!" <= character <= "~" for character in token):
        raise UserError(
            f"{option} names {variable}, and the environment has no such variable with a token of "
            "visible ASCII characters, which an HTTP header can hold"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address, where clients wait for a server. Raises UserError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"Cannot listen at {host} port {port}: {error}.") from error


def address_of(host: str, listening: socket.socket) -> str:
    """Return the address to print: this machine's name where it listens at all its addresses."""
    bound_host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(bound_host.partition("%")[0]).is_unspecified:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_server(
    app: Any, *, connections: int = CONNECTIONS, shutdown_timeout: int = 1
) -> "uvicorn.Server":
    """Return a server; `run(sockets=[listening])` serves until Ctrl-C.

    Args:
        app: an ASGI application.
        connections: open at a time; further ones are answered 503.
        shutdown_timeout: seconds that open requests have at the end.
    """
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", limit_concurrency=connections,
        timeout_graceful_shutdown=shutdown_timeout,
    )  # fmt: skip
    return uvicorn.Server(config)


def local_names(host: str) -> frozenset[str] | None:
    """Return what requests may name as Host; None, for anything, where they need a token anyway."""
    return frozenset((*LOOPBACK, host.lower())) if is_loopback(host) else None


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets, in lower case."""
    name, _, port = host.rpartition(":")
    has_port = bool(name) and port.isdigit() and not name.endswith(":")
    return (name if has_port else host).strip("[]").lower()


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which requests a server answers."""

    server: str  # the command, for error messages
    hosts: frozenset[str] | None  # names that Host may have; None for any, which needs a token
    token: str | None  # None for a server that only this machine reaches
    private: str  # prefix of the paths that need the token
    max_body: int  # bytes
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
        if kind != b"application/json":  # which no form of a page can send
            return 415, "expected application/json"
        size = header.get("content-length", b"")
        if not (size.isdigit() and int(size) <= self.max_body):
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

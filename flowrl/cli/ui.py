"""`flowrl ui`: a page over run folders."""

import os
import secrets
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import token_of
from flowrl.errors import Interrupted, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastapi import FastAPI

Host = Annotated[str, typer.Option(help="Address to listen at.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
TokenVariable = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Variable with the token to ask for; else a new one."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host", metavar="NAME",
        help="Another name of this machine that browsers may ask for; may be repeated.",
    ),
]  # fmt: skip
OpenBrowser = Annotated[
    bool, typer.Option("--open", help="Open the page in this machine's browser.")
]

LEADING = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>flowrl</title>
<a href="{address}">Go to the page</a>
"""


def ui(
    runs: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="Folder of run folders, or one run.")
    ] = Path("runs"),
    host: Host = "127.0.0.1",
    port: Port = 8401,
    token_env: TokenVariable = None,
    open_browser: OpenBrowser = False,
    allow_host: AllowedHosts = None,
) -> None:
    """Show runs in the browser: curves as they grow, images, recipes; compare, stop, resume, start.

    Prints an address with a token: whoever has it sees the runs and can start programs here, so
    keep it. Listens to this machine alone; --host with another address needs --token-env, and
    0.0.0.0 is all addresses of this machine. On a server, forward the port: ssh -L
    8401:127.0.0.1:8401 SERVER. Stop with Ctrl-C; runs go on.

    Examples:

      flowrl ui

      flowrl ui runs/quickstart --port 0 --open
    """
    token = checked_token(host, token_env)
    if runs.exists() and not runs.is_dir():
        raise UserError(f"{runs} is a file, expected a folder of runs or a run.")
    from flowrl.web.app import make_app

    shown = f"runs in {os.fspath(runs)}"
    app = serve_page(
        lambda hosts: make_app(runs, token=token, hosts=hosts), shown, host, port, token,
        open_browser, checked_names(allow_host or ()),
    )  # fmt: skip
    if left := app.state.jobs.running():
        print(f"Started here and going on: {left} of the runs.")


def checked_token(host: str, variable: str | None) -> str:
    """Return the token that a page asks for, that of a variable or a new one.

    Raises UserError for a token that cannot be sent, and where other machines are let in without
    one that was chosen.
    """
    from flowrl.cli.rewards import is_loopback
    from flowrl.scoring.protocol import TOKEN_RULE, is_sendable

    if variable is None and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in: name the variable with a token that they must "
            "send, as in --token-env UI_TOKEN."
        )
    token = token_of(variable) or secrets.token_urlsafe(24)
    if not is_sendable(token):
        raise UserError(f"the page's token {TOKEN_RULE}")
    return token


def serve_page(
    make_app: "Callable[[Sequence[str]], FastAPI]", what: str, host: str, port: int, token: str,
    open_browser: bool, allowed: "Sequence[str]" = (),
) -> "FastAPI":  # fmt: skip
    """Serve a page until Ctrl-C; print its address, with the token, first.

    make_app: of the names under which the page may be asked for. what: is shown, for the print.
    allowed: more of these names.
    """
    from urllib.parse import quote

    import uvicorn

    from flowrl.cli.rewards import bound, listen

    with bound(host, port) as listening:
        listen(listening)
        at, found = listening.getsockname()[:2]
        reachable, names = names_of(host, at)
        shown = f"[{reachable}]" if ":" in reachable else reachable
        address = f"http://{shown}:{found}/#token={quote(token, safe='')}"
        app = make_app((*names, *allowed))
        # Flushed: programs that read this through a pipe wait for it.
        print(f"{what} at {address}", flush=True)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        # Ctrl-C is how it ends; uvicorn has closed all by then.
        with suppress(Interrupted), open_page(address) if open_browser else nullcontext():
            uvicorn.Server(config).run(sockets=[listening])
    return app


def checked_names(names: "Sequence[str]") -> list[str]:
    """Return names of this machine in lower case. Raises UserError for what is no name."""
    from flowrl.web.app import host_name

    for name in names:
        if not name or name.strip() != name or "/" in name or host_name(name) != name.lower():
            raise UserError(
                f"--allow-host {name!r} is no name of a machine: leave out http:// and the port, "
                "as in box.example.com."
            )
    return [name.lower() for name in names]


def names_of(host: str, at: str) -> tuple[str, list[str]]:
    """Return the name under which a server is reached, and all under which it may be asked for.

    host: as given; at: the address that this has become. 0.0.0.0 and :: are all addresses of this
    machine, and none that a browser can ask for.
    """
    import ipaddress

    loopback = ["127.0.0.1", "localhost", "::1"]
    if not ipaddress.ip_address(at.partition("%")[0]).is_unspecified:
        return host, [*loopback, host.lower(), at]
    return _address_of_route(at), [*loopback, *_own_names()]


def _own_names() -> list[str]:
    """Return the addresses of this machine, its name, and the name's addresses."""
    import socket

    import psutil

    cards = psutil.net_if_addrs().values()
    internet = (socket.AF_INET, socket.AF_INET6)
    found = [address.address for card in cards for address in card if address.family in internet]
    name = socket.gethostname()
    with suppress(OSError):  # a name that leads nowhere
        for *_, full, address in socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME):
            found += [full, str(address[0])]
    found += [name, _address_of_route("0.0.0.0"), _address_of_route("::")]
    return sorted({name.partition("%")[0].lower() for name in found if name})


def _address_of_route(wildcard: str) -> str:
    """Return the address that this machine is seen at: that of its way to others, or loopback.

    Connecting a socket for datagrams only chooses the way: nothing is sent.
    """
    import socket

    six = ":" in wildcard
    other = "2001:db8::1" if six else "192.0.2.1"  # of documentation: nobody has it
    with (
        suppress(OSError),  # no way to others
        socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as way,
    ):
        way.connect((other, 9))
        return str(way.getsockname()[0])
    return "::1" if six else "127.0.0.1"


@contextmanager
def open_page(address: str) -> "Iterator[None]":
    """Open an address in this machine's browser, while the block runs.

    Every user of a machine can read the browser's command line, and the address has the token. So
    the browser is given a file that leads there, which its owner alone can read.
    """
    import html
    import tempfile
    import webbrowser

    handle, name = tempfile.mkstemp(prefix="flowrl-", suffix=".html")  # of mode 0600
    path = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(LEADING.format(address=html.escape(address)))
        if not webbrowser.open(path.as_uri()):
            print("No browser was found here: open that address in one.", flush=True)
        yield
    finally:
        path.unlink(missing_ok=True)

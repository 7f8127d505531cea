"""`flowrl ui`: a page over run folders."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.errors import Interrupted, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

Host = Annotated[str, typer.Option(help="Address to listen at.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
TokenVariable = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Environment variable with the token; default: a new token."),
]


def ui(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="Folder of run folders, or one run.")
    ] = Path("runs"),
    host: Host = "127.0.0.1",
    port: Port = 8401,
    token_env: TokenVariable = None,
) -> None:
    """Show runs in the browser: curves as they grow, images, recipes; compare, stop, resume, start.

    Prints an address with a token. Whoever has it sees the runs and can start programs here: keep
    it secret. Listens to this machine alone; --host with another address needs --token-env, and
    0.0.0.0 means all addresses of this machine. On a server, forward the port: ssh -L
    8401:127.0.0.1:8401 SERVER. Ctrl-C ends the page; runs continue.

    Examples:

      flowrl ui

      flowrl ui runs/quickstart --port 0
    """
    token = page_token(host, token_env)
    if runs.exists() and not runs.is_dir():
        raise UserError(f"{runs} is a file, expected a folder of runs or a run.")
    from flowrl.web.app import make_app

    app = make_app(runs, token=token, host=host)
    missing = "" if runs.exists() else " (there is no such folder yet)"
    serve_page(app, f"Runs of the folder {os.fspath(runs)}{missing}", host, port, token)


def page_token(host: str, variable: str | None) -> str:
    """Return the token of --token-env, or a new one where only this machine can connect."""
    from flowrl.utils.serving import read_token

    return read_token(host, variable) or secrets.token_urlsafe(24)


def serve_page(app: "FastAPI", what: str, host: str, port: int, token: str) -> None:
    """Serve a page until Ctrl-C; print its address, with the token, first.

    Args:
        what: content of the page, for the printed line.
    """
    from urllib.parse import quote

    from flowrl.utils.serving import address_of, listen, make_server

    with listen(host, port) as listening:
        address = f"{address_of(host, listening)}/#token={quote(token, safe='')}"
        # Flushed: programs that read this through a pipe wait for it.
        print(f"{what}:\n{address}", flush=True)
        # Ctrl-C is how it ends; uvicorn has closed all by then.
        with suppress(Interrupted):
            make_server(app).run(sockets=[listening])

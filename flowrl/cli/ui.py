"""`flowrl ui`: a page over run folders."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli._console import token_of
from flowrl.errors import Interrupted, UserError


def ui(
    runs: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="Folder of run folders, or one run.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8401,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variable with the token to ask for; else a new one."),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Show runs in the browser: curves as they grow, images, recipes; compare, stop, resume, start.

    Prints an address with a token: whoever has it sees the runs and can start programs here, so
    keep it. Listens to this machine alone; --host with another address needs --token-env. On a
    server, forward the port: ssh -L 8401:127.0.0.1:8401 SERVER. Stop with Ctrl-C; runs go on.

    Examples:

      flowrl ui

      flowrl ui runs/quickstart --port 0 --open
    """
    from flowrl.cli.rewards import bound, is_loopback, listen
    from flowrl.scoring.protocol import TOKEN_RULE, is_sendable

    if token_env is None and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in: name the variable with a token that they must "
            "send, as in --token-env UI_TOKEN."
        )
    token = token_of(token_env) or secrets.token_urlsafe(24)
    if not is_sendable(token):
        raise UserError(f"the page's token {TOKEN_RULE}")
    if runs.exists() and not runs.is_dir():
        raise UserError(f"{runs} is a file, expected a folder of runs or a run.")
    with bound(host, port) as listening:
        listen(listening)
        _serve(listening, runs, host, token, open_browser)


def _serve(listening, runs: Path, host: str, token: str, open_browser: bool) -> None:
    import webbrowser
    from urllib.parse import quote

    import uvicorn

    from flowrl.web.app import make_app

    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/#token={quote(token, safe='')}"
    app = make_app(runs, token=token, hosts=("127.0.0.1", "localhost", "::1", host.lower()))
    # Flushed: programs that read this through a pipe wait for it.
    print(f"runs in {os.fspath(runs)} at {address}", flush=True)
    if open_browser:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    with suppress(Interrupted):  # Ctrl-C is how it ends; uvicorn has closed all by then
        uvicorn.Server(config).run(sockets=[listening])
    if left := app.state.jobs.running():
        print(f"Started here and going on: {left} of the runs.")

"""`flowrl reward-check` and `reward-serve`: try rewards, and serve them over HTTP."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import (
    AsJson,
    arguments_of,
    print_checks,
    print_table,
    stop_unless_fine,
    token_of,
)
from flowrl.errors import CheckResult, UserError

if TYPE_CHECKING:
    import socket

    from flowrl.scoring.check import RewardCheck
    from flowrl.scoring.protocol import Codec
    from flowrl.scoring.spec import RewardSpec


def reward_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Built-in, or your own as module:attribute."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every built-in reward.")] = False,
    args: Annotated[
        str | None, typer.Option(metavar="YAML", help="Its arguments, as in '{mode: strict}'.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Use the one served there (flowrl reward-serve)."),
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the server's token.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds for each answer of the server.")
    ] = 60.0,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Yours: which can it judge? Without fixtures: tried on."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try rewards on images of known order: the right word must score above the wrong one.

    Scores must be finite, within the reward's bounds, and the same for an image by itself and among
    others. Also measures the time of one image, and images per second. Training does the same,
    without the times, before its first step.

    ok works, !! does not, ?? gave all images the same score, -- cannot run here: a package,
    weights or a server is missing. Exits with 1 after a !!, and after a -- of a reward that was
    named.

    Examples:

      flowrl reward-check ocr geneval

      flowrl reward-check ocr --args '{mode: strict}'

      flowrl reward-check my_rewards:sharpness --prompts prompts.jsonl

      flowrl reward-check hpsv3 --server http://127.0.0.1:8400

      flowrl reward-check --all
    """
    chosen = _chosen(names or [], everything=everything, given=bool(args or server))
    from flowrl.prompts.records import load_prompts
    from flowrl.scoring.check import check_named

    given = arguments_of(chosen, [args] if args is not None else None)
    token = token_of(token_env)
    records = load_prompts(prompts) if prompts else []
    states = {}
    for name, options in zip(chosen, given, strict=True):
        checked = check_named(
            name, options, urls=server or (), token=token, deadline=deadline, prompts=records
        )
        states[name] = {result.state for result in checked.results}
        if as_json:
            print_table([_row(name, checked, result) for result in checked.results], as_json=True)
        else:
            first, *others = checked.results
            print_checks([_with_times(checked, first), *others], max(map(len, chosen)))
    absent = "These rewards could not be asked, the lines marked -- say why"
    stop_unless_fine(
        states,
        wrong="These rewards do not work, the lines marked !! say why",
        absent=None if everything else absent,
    )


def _chosen(names: list[str], *, everything: bool, given: bool) -> list[str]:
    from flowrl.scoring.spec import BUILT_IN

    if everything == bool(names):
        raise UserError(
            "Give the names of rewards, or --all for every built-in one: "
            f"{', '.join(BUILT_IN)}; your own is module:attribute."
        )
    if given and len(names) != 1:
        raise UserError("--args and --server are of one reward: give one name with them.")
    return names or list(BUILT_IN)


def _row(name: str, checked: "RewardCheck", result: CheckResult) -> dict:
    return {
        "reward": name, "state": result.state, "detail": result.detail, "remedy": result.remedy,
        "version": checked.version, "images": checked.images, "seconds_p50": checked.latency,
        "images_per_second": checked.rate,
    }  # fmt: skip


def _with_times(checked: "RewardCheck", result: CheckResult) -> CheckResult:
    """Return a result about scores with the time they took."""
    if result.state not in ("ok", "warning"):
        return result
    times = f"; {1000 * checked.latency:.3g} ms a call, {checked.rate:.3g} images/s"
    version = f"; {checked.version}" if checked.version else ""
    return replace(result, detail=result.detail + times + version)


SERVER_PACKAGES = ("fastapi", "uvicorn", "python-multipart")


def reward_serve(  # noqa: PLR0913
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Built-in, or your own as module:attribute."),
    ],
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="YAML", help="Arguments, as in '{mode: strict}'; one for each NAME."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the token to ask for.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, metavar="MB", help="Largest request.")] = 64,
    max_batch: Annotated[int, typer.Option(min=1, help="Most images in a request.")] = 64,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes for each reward, on this machine's GPUs in turn; 0 is a thread here.",
        ),
    ] = 0,
    devices: Annotated[
        str | None,
        typer.Option(metavar="0-7", help="GPUs for the processes; without --workers one for each."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds for one question to a process, then it is replaced.",
            show_default="60",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Most images in one question to a process.", show_default="8"),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Accept only these: png, webp-lossless, raw-zlib, raw, or jpeg (lossy)."),
    ] = None,
    max_pixels: Annotated[
        int, typer.Option(min=1, help="Most pixels of all images of a request together.")
    ] = 4096 * 4096,
    max_pending_bytes: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Of all requests that wait together.")
    ] = 256,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections of one address at a time.")
    ] = 64,
    batch_wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="MS", help="How long a request waits for others to be scored with it."
        ),
    ] = 0.0,
) -> None:
    """Serve rewards over HTTP, to runs with executor: {kind: http, urls: [...]}.

    Each that has fixtures is loaded and scores one before the address is printed.
    Listens to this machine alone; --host with another address needs --token-env. Stop with Ctrl-C.

    Examples:

      flowrl reward-serve ocr geneval

      flowrl reward-serve ocr --args '{mode: strict}' --workers 2 --timeout 20

      flowrl reward-serve pickscore --devices 0-7

      flowrl reward-serve my_rewards:sharpness --host rewards.example.com --token-env REWARD_TOKEN
    """
    token = _token(host, token_env)
    codecs = _codecs(codec)
    gpus = None if devices is None else _gpu_numbers(devices)
    workers = workers or len(gpus or ())
    if not workers and (timeout or micro_batch):
        raise UserError("--timeout and --micro-batch are for processes: give --workers as well.")
    given = arguments_of(names, args)
    _need([*SERVER_PACKAGES, "pebble"] if workers else SERVER_PACKAGES)
    from flowrl.scoring.server import make_app, warm_up

    pool = {"workers": workers, "timeout": timeout or 60.0, "micro_batch": micro_batch or 8}
    with bound(host, port) as listening:
        specs = [
            _spec(name, its, **pool, gpus=own)
            for name, its, own in zip(
                names, given, _shared_gpus(len(names), workers, gpus), strict=True
            )
        ]
        try:
            app = make_app(
                specs, token=token, max_body=max_body * 2**20, max_batch=max_batch, codecs=codecs,
                max_pixels=max_pixels, max_pending_bytes=max_pending_bytes * 2**20,
                batch_wait=batch_wait / 1000,
            )  # fmt: skip
            late = [spec.name for spec in specs if not warm_up(spec)]
            listen(listening)
        except BaseException:
            for spec in specs:
                spec.get_executor().close()
            raise
        try:
            _serve(app, listening, host, names, late, max_connections)
        finally:  # the application has closed the rewards
            if not_closed := app.state.service.not_closed:
                print(f"left behind, for they do not end: {', '.join(not_closed)}", file=sys.stderr)
                os._exit(1)


def bound(host: str, port: int) -> "socket.socket":
    """Bind an address that clients reach after `listen`. Raises UserError when it is not free."""
    import socket

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


def listen(listening: "socket.socket") -> None:
    """Let clients in. Raises UserError when another server was faster."""
    try:
        listening.listen()
    except OSError as error:
        host, port = listening.getsockname()[:2]
        raise UserError(f"Cannot listen at {host} port {port}: {error}.") from error


def _need(packages: Sequence[str]) -> None:
    """Raise UserError for packages that cannot be imported."""
    import importlib

    absent: dict[str, ImportError] = {}
    for package in packages:
        try:
            importlib.import_module(package.replace("-", "_"))
        except ImportError as error:
            absent[package] = error
    if absent:
        why = "; ".join(map(str, absent.values()))
        raise UserError(
            f"flowrl reward-serve needs {', '.join(absent)} ({why}): pip install {' '.join(absent)}"
        )


def _token(host: str, variable: str | None) -> str | None:
    if variable is None and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in: name the variable with a token that they must "
            "send, as in --token-env REWARD_TOKEN."
        )
    return token_of(variable)


def is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _codecs(chosen: Sequence[str] | None) -> "list[Codec]":
    from flowrl.scoring.protocol import CODECS, LOSSLESS

    if unknown := set(chosen or ()) - set(CODECS):
        raise UserError(f"--codec is one of {', '.join(CODECS)}, not {', '.join(sorted(unknown))}.")
    return [codec for codec in CODECS if codec in (chosen or LOSSLESS)]


def _shared_gpus(rewards: int, workers: int, gpus: Sequence[int] | None = None) -> list[list[int]]:
    """Return the GPUs of each reward's workers.

    With `gpus` the workers of a reward take these in turn, else all workers this machine's.
    """
    if not workers:
        return [[]] * rewards
    if gpus is not None:
        return [[gpus[j % len(gpus)] for j in range(workers)] for _ in range(rewards)]
    import torch

    count = torch.cuda.device_count()
    places = range(workers if count else 0)
    return [[(i * workers + j) % count for j in places] for i in range(rewards)]


def _gpu_numbers(text: str) -> list[int]:
    """Return the numbers in a text such as "0-3,6". Raises UserError for another form."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        own = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not own:
            raise UserError(f"--devices is {text!r}, expected numbers of GPUs, as in 0-7 or 0,2,5.")
        numbers += own
    return numbers


def _spec(
    name: str,
    args: dict | None,
    *,
    workers: int,
    timeout: float,
    micro_batch: int,
    gpus: Sequence[int],
) -> "RewardSpec":
    """Return a reward in a thread of this process, or in `workers` processes on `gpus`."""
    from flowrl.scoring.executors.base import InlineExecutor
    from flowrl.scoring.spec import BUILT_IN, RewardSpec, load_reward

    spec = RewardSpec(name=name, reward=load_reward(name, args))
    if not workers:
        return replace(spec, executor=InlineExecutor(spec.reward, spec.name, background=True))
    from flowrl.scoring.executors.pool import PoolExecutor

    executor = PoolExecutor(
        BUILT_IN.get(spec.name, spec.name), args, spec.name, workers=workers, timeout=timeout,
        micro_batch=None if spec.whole_groups else micro_batch, gpus=gpus,
    )  # fmt: skip
    return replace(spec, executor=executor)


def _serve(
    app, listening: "socket.socket", host: str, names: list[str], late: list[str], connections: int
) -> None:
    import uvicorn

    from flowrl.scoring.admission import guarded_http

    shown = f"[{host}]" if ":" in host else host
    # Flushed: programs that read this through a pipe wait for it.
    print(f"serving {', '.join(names)} at http://{shown}:{listening.getsockname()[1]}", flush=True)
    if late:
        print(f"not tried yet, loads at the first question: {', '.join(late)}", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=5, http=guarded_http(connections)
    )
    uvicorn.Server(config).run(sockets=[listening])

"""`flowrl reward-check`: does a reward work, before anything learns from it?"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.findings import Finding
    from flowrl.scoring.check import Checked


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
        typer.Option(metavar="URL", help="Ask the one served there (flowrl reward-serve)."),
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the server's token.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds for each answer of the server.")
    ] = 60.0,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Prompts to try it on, if it has no fixtures."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Try rewards on pictures of known order: the right word must score above the wrong one.

    Scores must be finite, within the reward's bounds, and the same when a picture is asked for
    alone or in other company. Also measures the time of one picture, and pictures per second.
    Training does the same, without the times, before its first step.

    ok works, !! does not, ?? gave all pictures the same score, -- cannot be asked here: a package,
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
    from flowrl.cli._console import (
        arguments_of,
        print_findings,
        print_table,
        stop_unless_fine,
        token_of,
    )
    from flowrl.prompts.records import load_prompts
    from flowrl.scoring.named import check_named

    given = arguments_of(chosen, [args] if args is not None else None)
    token = token_of(token_env)
    records = load_prompts(prompts) if prompts else []
    checks = {}
    width = max(map(len, chosen))
    for name, options in zip(chosen, given, strict=True):
        checked = check_named(
            name,
            options,
            urls=server or (),
            token=token,
            deadline=deadline,
            prompts=records,
        )
        checks[name] = checked
        if as_json:
            print_table(
                [_row(name, checked, finding) for finding in checked.findings], as_json=True
            )
        else:
            print_findings((_timed(checked, finding) for finding in checked.findings), width)
    absent = "These rewards could not be asked, the lines marked -- say why"
    stop_unless_fine(
        {name: {f.state for f in checked.findings} for name, checked in checks.items()},
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


def _row(name: str, checked: "Checked", finding: "Finding") -> dict:
    return {
        "reward": name,
        "state": finding.state,
        "detail": finding.detail,
        "remedy": finding.remedy,
        "version": checked.version,
        "pictures": checked.pictures,
        "seconds_p50": checked.latency,
        "pictures_per_second": checked.rate,
    }


def _timed(checked: "Checked", finding: "Finding") -> "Finding":
    """A finding about scores with how long they took."""
    if finding.state not in ("ok", "warning"):
        return finding
    times = f"; {1000 * checked.latency:.3g} ms a call, {checked.rate:.3g} pictures/s"
    version = f"; {checked.version}" if checked.version else ""
    return replace(finding, detail=finding.detail + times + version)

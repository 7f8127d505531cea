"""`flowrl reward-check`: does a reward work, before anything learns from it?"""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.doctor import Finding
    from flowrl.preflight.check import Checked


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

    ok works, !! does not, -- cannot be asked here: a package, weights or a server is missing.
    Exits with 1 after a !!, and after a -- of a reward that was named.

    Examples:

      flowrl reward-check ocr geneval

      flowrl reward-check ocr --args '{mode: strict}'

      flowrl reward-check my_rewards:sharpness --prompts prompts.jsonl

      flowrl reward-check hpsv3 --server http://127.0.0.1:8300

      flowrl reward-check --all
    """
    chosen = _chosen(names or [], everything=everything, given=bool(args or server))
    options = _mapping(args)
    token = _token(token_env)
    from flowrl.commands.show import print_table
    from flowrl.preflight.named import check_named
    from flowrl.prompts import load_prompts

    records = load_prompts(prompts) if prompts else []
    checks = {}
    width = max(map(len, chosen))
    for name in chosen:
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
            _show(name, checked, width)
    _conclude(checks, named=not everything)


def _chosen(names: list[str], *, everything: bool, given: bool) -> list[str]:
    from flowrl.reward import BUILT_IN

    if everything == bool(names):
        raise UserError(
            "Give the names of rewards, or --all for every built-in one: "
            f"{', '.join(BUILT_IN)}; your own is module:attribute."
        )
    if given and len(names) != 1:
        raise UserError("--args and --server are of one reward: give one name with them.")
    return names or list(BUILT_IN)


def _mapping(text: str | None) -> dict | None:
    from flowrl.recipe import load_yaml

    found = load_yaml(text, "--args") if text is not None else None
    if not isinstance(found, dict | None):
        raise UserError(f"--args is {text!r}, expected names and values, as in '{{mode: strict}}'.")
    return found


def _token(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"--token-env names {variable}, and the environment has no such variable.")
    return os.environ[variable] if variable else None


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


def _show(name: str, checked: "Checked", width: int) -> None:
    """As `flowrl doctor` does: a mark, what about, what was found; below it what to do."""
    from rich.console import Console
    from rich.text import Text

    from flowrl.commands.looking import MARKS

    console = Console(soft_wrap=True, highlight=False)
    for finding in checked.findings:
        mark, style = MARKS[finding.state]
        detail = finding.detail
        if finding.state == "ok":
            times = f"; {1000 * checked.latency:.3g} ms a call, {checked.rate:.3g} pictures/s"
            detail += times + (f"; {checked.version}" if checked.version else "")
        console.print(Text(mark, style=style) + Text(f"  {name:<{width}}  {detail}"))
        if finding.remedy:
            console.print(Text(f"    {'':<{width}}  {finding.remedy}", style="dim"))


def _conclude(checks: "dict[str, Checked]", *, named: bool) -> None:
    """Raises UserError when a reward has a problem, or one that was asked for is missing."""
    states = {
        name: {finding.state for finding in checked.findings} for name, checked in checks.items()
    }
    wrong = [name for name, found in states.items() if "problem" in found]
    if wrong:
        raise UserError(
            f"These rewards do not work, the lines marked !! say why: {', '.join(wrong)}."
        )
    absent = [name for name, found in states.items() if "missing" in found]
    if absent and named:
        raise UserError(
            f"These rewards could not be asked, the lines marked -- say why: {', '.join(absent)}."
        )

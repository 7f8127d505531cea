"""`flowrl runs`: list run folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.cli._console import AsJson, print_table, say
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.web.runs import RunFiles

Folder = Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of runs, or one run.")]


def runs(
    folder: Folder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs with state, held-out scores and size on disk.

    Examples:

      flowrl runs

      flowrl runs runs/quickstart
    """
    from flowrl.web.runs import RunFolders

    if not folder.is_dir():
        raise UserError(
            f"There is no folder {folder}: name the one that holds your runs; flowrl train RECIPE "
            "makes one."
        )
    listed = RunFolders(folder).runs()
    if not listed:
        raise UserError(f"There is no run in {folder}: flowrl train RECIPE makes one.")
    rows = [_summary(run) if as_json else _row(run) for run in listed]
    print_table(rows, as_json=as_json, whole="run")
    for run in [] if as_json else listed:
        if (state := run.state()).name in ("stopped", "failed", "killed"):
            say(f"{run.name}: {state.detail}")


def _summary(run: "RunFiles") -> dict[str, Any]:
    return run.summary() | {"MB": _megabytes(run.path)}


def _row(run: "RunFiles") -> dict[str, object]:
    """Return a row for people: held-out scores before training and now, one reward on a line."""
    summary = _summary(run)
    total = f" of {summary['iterations']}" if summary["iterations"] else ""
    base, now = summary["base"], summary["held_out"]
    scores = []
    for name in base | now:
        values = [f"{s[name]:.3f}" for s in (base, now) if s.get(name) is not None]
        scores.append(f"{name.removeprefix('eval/')} {' to '.join(dict.fromkeys(values))}")
    return {
        "run": summary["run"],
        "state": summary["state"],
        "iteration": f"{summary['step']}{total}",
        "held-out": "\n".join(scores),
        "MB": summary["MB"],
    }


def _megabytes(folder: Path) -> float:
    """Return the size of a folder; a link counts as itself."""
    files = (f for f in folder.rglob("*") if f.is_symlink() or f.is_file())
    total = sum(f.lstat().st_size for f in files)
    return round(total / 1e6, 1)

"""`flowrl runs`: list run folders, and free disk space."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import AsJson, print_table, say
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.web.runs import RunFiles

Folder = Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of runs, or one run.")]


def runs(
    folder: Folder = Path("runs"),
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Remove from finished runs what neither resuming nor the card needs: checkpoints "
            "but the newest and the best, and what was set aside.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before removing.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with state, score and size on disk; with --prune remove what is left over.

    The LoRA, the newest and the best checkpoint, metrics, ledger, evaluations, gallery and card
    always stay. A run that is unfinished or in use is not touched.

    Examples:

      flowrl runs

      flowrl runs runs/quickstart --prune
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
    if not prune:
        rows = [_json_row(run) if as_json else _row(run) for run in listed]
        print_table(rows, as_json=as_json, whole="run")
        for run in [] if as_json else listed:
            if (state := run.state()).name in ("stopped", "failed", "killed"):
                say(f"{run.name}: {state.detail}")
        return
    spare = {run.name: (run, list(_spare(run))) for run in listed}
    rows = [
        {"run": name, "to remove": len(paths), "MB": _megabytes(paths)}
        for name, (_, paths) in spare.items()
        if paths
    ]
    if not rows:
        say("Nothing to remove.")
        return
    print_table(rows, as_json=as_json, whole="run")
    if not yes:
        typer.confirm("Remove these?", abort=True)
    for run, paths in spare.values():
        if paths:
            _remove(run, paths)


def _json_row(run: "RunFiles") -> dict[str, object]:
    summary = run.summary()
    names: dict[str, str] = {
        "run": "run", "state": "state", "iteration": "step", "of": "iterations", "base": "base",
        "held out": "held_out",
    }  # fmt: skip
    row: dict[str, object] = {name: summary[key] for name, key in names.items()}
    return row | {"MB": _megabytes([run.path])}


def _row(run: "RunFiles") -> dict[str, object]:
    """Return a row for people: held-out scores before training and now, one reward on a line."""
    summary = run.summary()
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
        "MB": _megabytes([run.path]),
    }


def _spare(run: "RunFiles") -> Iterator[Path]:
    """Yield the folders of a finished run that neither resuming nor the card needs."""
    from flowrl.training.checkpoint import Checkpoints

    if run.state().name != "finished":
        return
    checkpoints = Checkpoints(run.path, keep=1)
    newest = checkpoints.newest()  # an intact one, or none is spare
    if newest is not None:
        path, state = newest
        best = state["best"][1] if state["best"] else None
        yield from (
            checkpoints.path(step)
            for step in checkpoints.steps()
            if step != best and checkpoints.path(step) != path
        )
    if (run.path / "set-aside").is_dir():
        yield run.path / "set-aside"


def _megabytes(paths: list[Path]) -> float:
    """Return the size of files and folders; a link counts as itself."""
    files = [f for p in paths for f in (p.rglob("*") if p.is_dir() else [p])]
    total = sum(f.lstat().st_size for f in files if f.is_symlink() or f.is_file())
    return round(total / 1e6, 1)


def _remove(run: "RunFiles", paths: list[Path]) -> None:
    """Remove folders of a run, which is locked meanwhile."""
    import shutil

    from flowrl.training.checkpoint import LATEST, STATE, claim, remove_checkpoint

    with claim(run.path, resume=LATEST):
        for path in paths:
            if (path / STATE).is_file():
                remove_checkpoint(path)
            else:
                shutil.rmtree(path)

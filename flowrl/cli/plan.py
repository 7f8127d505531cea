"""`flowrl plan`: how a recipe's work is split over GPUs, how much it is, and whether it fits."""

import gc
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.cli._console import print_table, say, starting
from flowrl.cli.train import Words, recipe_request

if TYPE_CHECKING:
    from flowrl.config import Config
    from flowrl.config.sections import RunOptions
    from flowrl.planning.duration import Duration
    from flowrl.planning.plan import Plan

GB = 1e9


def plan(
    words: Words = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many GPUs of one machine, a process each; by default what the head of the "
            "recipe's file says.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="24GB",
            help="Memory per GPU; by default what the recipe's name says, as in -24gb.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="64GB", help="The machine's own memory; by default this machine's."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, metavar="2.5", help="Price per GPU-hour.")
    ] = None,
) -> None:
    """Show the work, the memory and the hours of a recipe, before any download.

    Needs no GPU and no weights: networks are built from their shapes alone. Where the GPU's or the
    machine's memory does not suffice, it says what to change, and the exit code is 1. A GPU of 24
    GB has 24 * 10^9 bytes here, a little less than it has. Hours are estimates from the published
    peaks of cards; docs/memory.md explains the parts of memory.

    Examples:

      flowrl plan sd3.5-medium-grpo-24gb

      flowrl plan flux.1-dev-grpo-80gb --memory 48GB --price 2.5

      flowrl plan flux.1-dev-grpo-80gb --gpus 8 runtime.shard=node

      flowrl plan my_recipe.yaml optim.micro_batch=4 --memory 24GiB
    """
    from flowrl.config import load_config

    collects = gc.isenabled()
    gc.disable()  # what is imported stays: looking in it for garbage takes a sixth of the time
    try:
        with starting():
            from flowrl.planning.plan import gpus_of, make_plan, memory_class, parse_memory

        request = recipe_request(words, "flowrl plan quickstart")
        config = load_config(request.recipe, request.overrides)
        size = memory_class(Path(request.recipe).name) if memory is None else parse_memory(memory)
        host = None if host_memory is None else parse_memory(host_memory, "--host-memory")
        count = gpus or gpus_of(request.recipe)
        planned = make_plan(config, gpus=count, memory=size, host_memory=host)
    finally:
        if collects:
            gc.enable()
    _show_shares(planned)
    print_table(_work_rows(config, planned))
    say("\nForwards of one image; those of training are the most there can be.\n")
    _show_memory(planned)
    if planned.duration is not None:
        _show_time(planned, planned.duration, price, config.run)
    for note in planned.notes:
        say(note)
    if planned.fits is False or not planned.host_fits:
        raise typer.Exit(1)


def _show_shares(planned: "Plan") -> None:
    geometry, load = planned.geometry, planned.geometry.load
    say(
        f"{load.prompts} prompts with {load.roots * load.leaves} images each, in {load.updates} "
        f"{'update' if load.updates == 1 else 'updates'}, on {_gpus(geometry.gpus)}\n"
    )
    print_table(_share_rows(planned))
    say(
        f"\nAn update learns from {_range(geometry.update_rows)} {_rows(planned)}, whatever the "
        "number of GPUs."
    )
    if not geometry.even:
        say(
            "GPUs wait for each other; none does where rollout.prompts_per_iteration is a multiple "
            f"of {geometry.gpus * load.updates}."
        )
    say("")


def _share_rows(planned: "Plan") -> list[dict[str, Any]]:
    """Return one row for all GPUs with the same share."""
    return [
        {
            "GPUs": count,
            "prompts": share.prompts,
            **({"candidates": share.candidates} if share.candidates else {}),
            "trees": share.trees,
            "images": share.images,
            f"{_rows(planned)} an update": _range(share.rows),
            "micro-batches": _range(share.micro_batches),
        }
        for share, count in Counter(planned.geometry.shares).items()
    ]


def _rows(planned: "Plan") -> str:
    return "nodes" if planned.work.needs.states == "transitions" else "images"


def _work_rows(config: "Config", planned: "Plan") -> list[dict[str, Any]]:
    from dataclasses import asdict

    work = planned.work
    columns = {"an iteration": work.first, f"{config.run.iterations} iterations": work.total}
    if work.evaluations:
        columns["an evaluation"] = work.evaluation
        columns[f"{work.evaluations} evaluations"] = work.evaluated
    rows = {of: asdict(one) for of, one in columns.items()}
    # A quantity a line: beside each other they do not fit a screen.
    return [
        {"": name} | {of: f"{row[name]:,}" if row[name] else "" for of, row in rows.items()}
        for name in rows["an iteration"]
        if any(row[name] for row in rows.values())
    ]


def _show_memory(planned: "Plan") -> None:
    if planned.peak is None:
        say(f"Memory: {planned.unknown}.")
        return
    names = dict.fromkeys(name for phase in planned.phases for name in phase.parts)
    shown = [n for n in names if any(phase.parts.get(n, 0) for phase in planned.phases)]
    rows = [
        {"GB on a GPU": name} | {p.phase: _gb(p.parts.get(name, 0)) for p in planned.phases}
        for name in shown
    ]
    total = {"GB on a GPU": "total"} | {p.phase: _gb(p.total) for p in planned.phases}
    print_table([*rows, total])
    say(f"\nThe peak is {_gb(planned.peak.total)} GB, in {planned.peak.phase}.")
    if planned.memory is not None:
        _show_verdict(planned)
    parts = ", ".join(f"{_gb(size)} for {name}" for name, size in planned.host.items() if size)
    whole = _gb(sum(planned.host.values()))
    say(f"The machine's own memory, for all GPUs: at most {whole} GB: {parts}.")
    if not planned.host_fits:
        say(
            f"It does not fit the machine's {_gb(planned.host_memory)} GB: set "
            "memory.prompt_cache=PATH (encoded prompts stay in files), use fewer --gpus, or name "
            "another machine's memory with --host-memory."
        )


def _show_verdict(planned: "Plan") -> None:
    if planned.fits:
        say(f"It fits a GPU of {_gb(planned.memory)} GB.")
        return
    assert planned.peak is not None
    say(f"It does not fit a GPU of {_gb(planned.memory)} GB.")
    say(f"Changes that lower {planned.peak.phase}, from what costs least:\n")
    for line in planned.advice:
        say(f"  {line}")


def _show_time(
    planned: "Plan", duration: "Duration", price: float | None, run: "RunOptions"
) -> None:
    """Print the hours on each card that holds the recipe, and what fits in run.max_minutes."""
    from flowrl.planning.duration import SHARES

    say(
        f"An iteration takes {duration.iteration:.3g} operations, the run {duration.run:.3g}, "
        "without text encoders and rewards.\n"
    )
    rows = []
    for card, hours in duration.estimates(planned.peak.total if planned.peak else 0).items():
        row = {"GPU": card, "hours of all iterations": " to ".join(map(_figures, hours))}
        if run.max_minutes is not None:
            done = [min(run.iterations, run.iterations * run.max_minutes / 60 / h) for h in hours]
            row[f"iterations in {run.max_minutes / 60:g} hours"] = (
                f"{_figures(done[1])} to {_figures(done[0])}"
            )
        if price is not None:
            row["cost"] = " to ".join(f"{h * duration.gpus * price:,.0f}" for h in hours)
        rows.append(row)
    if not rows:
        say("No card of the table has that much memory: no hours are estimated.")
        return
    print_table(rows)
    if run.max_minutes is not None:
        say(
            f"run.max_minutes ends the run after {run.max_minutes / 60:g} hours at the latest, "
            "with the LoRA of that moment; it can be resumed."
        )
    most, least = SHARES[duration.compiled]
    blocks = "compiled blocks" if duration.compiled else "twice that with pipeline.compile=true"
    say(
        f"\nAn estimate for {_gpus(duration.gpus)}: networks at {most:.0%} to {least:.0%} of the "
        f"card's published peak in bf16 ({blocks}), without waiting for rewards or servers.\n"
    )


def _figures(value: float) -> str:
    """Write two digits or more, and no exponent of a large number."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _gpus(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'}"


def _gb(count: int | None) -> str:
    return f"{(count or 0) / GB:.2f}"


def _range(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"

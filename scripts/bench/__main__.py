"""Measure what sampling and training cost: `python -m scripts.bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli._console import AsJson, Device, print_table

app = typer.Typer(no_args_is_help=True, add_completion=False)

Model = Annotated[str, typer.Option(help="A diffusers pipeline, or tiny-sd3.")]
Batch = Annotated[int, typer.Option(min=1, help="Most images in one forward.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds, in which jobs take turns.")]


@app.callback()
def bench() -> None:
    """Measure what sampler, training and rewards cost, as ratios within one run.

    Examples:

      python -m scripts.bench rollout --batch 64 --threads 1

      python -m scripts.bench tree

      python -m scripts.bench two-stage

      python -m scripts.bench iteration --size flux.1-dev

      python -m scripts.bench scale --device cpu
    """


@app.command()
def rollout(
    model: Model = "tiny-sd3",
    batch: Batch = 64,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 8,
    threads: Threads = 1,
    repeats: Repeats = 15,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time of sampler and update beyond the network's own passes.

    Jobs take turns. A ratio is that of a job's seconds by those of what it is compared with, in the
    CPU's own seconds where there is no GPU: the mean over the middle half of the rounds, whose ends
    are its spread.

    Example:

      python -m scripts.bench rollout --batch 64 --threads 1
    """
    from scripts.bench.rollout import bench_rollout

    rows = bench_rollout(
        model=model, batch=batch, steps=steps, threads=threads, repeats=repeats, device=device
    )
    print_table(rows, as_json=as_json)


@app.command()
def tree(
    model: Model = "tiny-sd3",
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 12,
    prompts: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts sampled together, may be repeated; default 1, 2, 6."),
    ] = None,
    threads: Threads = 1,
    repeats: Repeats = 2,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """16 images of a prompt as a tree against chains, and a pruned update.

    Next to it: what the plans' own counts predict.

    Example:

      python -m scripts.bench tree
    """
    from scripts.bench.rollout import bench_tree

    rows = [
        {"prompts": count} | row
        for count in prompts or (1, 2, 6)
        for row in bench_tree(
            model=model, prompts=count, batch=batch, steps=steps, threads=threads, repeats=repeats,
            device=device,
        )
    ]  # fmt: skip
    print_table(rows, as_json=as_json)


@app.command()
def two_stage(  # noqa: PLR0913  # an argument for each option
    model: Model = "tiny-sd3",
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of a pipeline: sd3.5-large, sd3.5-medium, flux.1-dev or sana-1.6b with "
            "random weights. May be repeated."
        ),
    ] = None,
    counts: Annotated[
        list[str] | None,
        typer.Option(
            help="Kept/candidates@steps of a candidate/steps of a kept image. May be repeated. "
            "Default 24/96@6/10, and for sizes 16/128@4/10 too."
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Candidates and kept ones times this, to be done sooner.")
    ] = 1.0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts sampled together.")] = 1,
    precision: Annotated[
        str, typer.Option(help="Of candidates: auto, nvfp4, fp8, bf16 or nvfp4-emulated.")
    ] = "auto",
    min_dim: Annotated[
        int | None,
        typer.Option(
            help="Layers of this size or smaller stay exact. Default 128 for tiny-sd3, else the "
            "network's own, as in training."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Most images in one forward. Default 24, for sizes 8."),
    ] = None,
    decode_batch: Annotated[
        int, typer.Option(min=1, help="For sizes: most images in the decoder.")
    ] = 4,
    pixels: Annotated[
        int | None, typer.Option(help="For sizes: an image's side. Default 1024, FLUX.1 512.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="For sizes: blocks of each kind, only to see that everything runs."),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option(help="Compile the sampling network. Default on a GPU.")
    ] = None,
    threads: Threads = 1,
    repeats: Repeats = 7,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Exploring cheaply and regenerating a few, against sampling all candidates exactly.

    Prints seconds by phase and the ratio beside the cost model's, ((s/S)/q + phi)/(1 + phi) + K/N:
    q is the speed of a cheap step over an exact one, phi the time to decode and score an image over
    that to sample it, both measured in this run. Expected are ratios of at most 1.1 times the
    model's. On a CPU seconds are the processor's own, and q is 1 or less. Jobs take turns, and each
    ratio is the mean over the middle half of the rounds' own.

    Sizes need a GPU and have not been run on one yet, neither fp8 on Hopper nor nvfp4 on Blackwell.

    Examples:

      python -m scripts.bench two-stage

      python -m scripts.bench two-stage --precision nvfp4-emulated

      python -m scripts.bench two-stage --size sd3.5-large --size flux.1-dev --precision fp8

      python -m scripts.bench two-stage --size sana-1.6b --device cpu --layers 2 --pixels 64 \\
        --counts 1/4@2/3 --repeats 1
    """
    from scripts.bench.random_model import model_spec
    from scripts.bench.two_stage import PUBLISHED, WIDER, bench_sizes, bench_solrl, parse_counts

    for name in size or ():
        model_spec(name)  # all of them before the first is measured
    given = [parse_counts(text) for text in counts or ()]
    plans = [one.scaled(scale) for one in given or ([PUBLISHED, WIDER] if size else [PUBLISHED])]
    for name in size or ():
        rows = bench_sizes(
            name=name, plans=plans, prompts=prompts, precision=precision, min_dim=min_dim,
            batch=batch or 8, decode_batch=decode_batch, pixels=pixels, layers=layers,
            compile=compile, repeats=repeats, device=device,
        )  # fmt: skip
        _print_costs(rows, as_json)
    for one in () if size else plans:
        row = bench_solrl(
            model=model, counts=one, prompts=prompts, precision=precision, min_dim=min_dim,
            batch=batch or 24, compile=compile, threads=threads, repeats=repeats, device=device,
        )  # fmt: skip
        _print_costs([row], as_json)


@app.command()
def iteration(  # noqa: PLR0913  # an argument for each option
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="sd3.5-medium, sd3.5-large, flux.1-dev or sana-1.6b. May be repeated. Default all "
            "but sd3.5-large."
        ),
    ] = None,
    pixels: Annotated[
        int | None, typer.Option(help="An image's side. Default 512, SANA 1024.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks of each kind, only to see that everything runs.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of the iteration.")] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Images of a prompt.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Denoising steps.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Most images in one forward of the rollout.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most forwards in one backward pass.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    precision: Annotated[
        str | None,
        typer.Option(help="Of frozen weights: fp8, nvfp4 and so on; see pipeline.precision."),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile the repeated blocks.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Compute activations again in the backward pass.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Iterations that are measured, after a first one.")
    ] = 3,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """One iteration of Flow-GRPO on pipelines of real size with random weights.

    Seconds, images a second, the share of sampling that is spent in the transformer's forwards
    (0.90 or more are expected on a GPU), learning by its bare passes, and the most memory of each
    phase beside what `flowrl plan` predicts for the same settings (within 10 % are expected). Text
    and rewards are noise. Seconds and shares are means over the middle half of the iterations; on
    a CPU seconds are the processor's own.

    Wants a GPU, of 80 GB for FLUX.1.

    Examples:

      python -m scripts.bench iteration --json

      python -m scripts.bench iteration --size flux.1-dev --gradient-checkpointing

      python -m scripts.bench iteration --size sana-1.6b --device cpu --layers 2 --pixels 64
    """
    from scripts.bench.iteration import bench_iteration, work_of
    from scripts.bench.random_model import model_spec

    names = size or ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
    changes = {
        "prompts": prompts, "group_size": group_size, "steps": steps, "batch": batch,
        "micro_batch": micro_batch,
    }  # fmt: skip
    given = {name: value for name, value in changes.items() if value is not None}
    for name in names:
        model_spec(name)  # all of them before the first is measured
    for name in names:
        row = bench_iteration(
            name=name, work=work_of(name, given), pixels=pixels, layers=layers, dtype=dtype,
            precision=precision, compile=compile, gradient_checkpointing=gradient_checkpointing,
            repeats=repeats, device=device,
        )  # fmt: skip
        if as_json:
            print_table([row], as_json=True)
            continue
        print_table(row.pop("phases"))
        print()
        print_table([{"what": what, "is": value} for what, value in row.items()])


@app.command()
def scale(
    model: Model = "tiny-sd3",
    processes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Processes, and workers; may be repeated. Default 1, 2 and 4."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of an iteration.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps.")] = 6,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations that are timed.")] = 3,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that a reward waits an iteration; 0 is no such.")
    ] = 5.0,
    threads: Threads = 1,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """An iteration on several processes, replicated and sharded, and with workers.

    Seconds beside the network's bare passes, MB of a process, and how far the trained weights are
    from those of the job that a row is compared with. The last rows show a reward that waits: what
    `rollout.staleness: 1` saves. Processes on GPUs need one each.

    Examples:

      python -m scripts.bench scale --device cpu

      python -m scripts.bench scale --processes 8 --json
    """
    from scripts.bench.scale import bench_scale

    rows = bench_scale(
        model=model, processes=tuple(processes or (1, 2, 4)), prompts=prompts, steps=steps,
        iterations=iterations, wait=wait, threads=threads, device=device,
    )  # fmt: skip
    print_table(rows, as_json=as_json)


@app.command()
def certify(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="Recipes whose checkpoints' sizes are measured."),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="A part to run; may be repeated. Default all.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Of the machines' files.")
    ] = Path("gallery/gpu"),
    minutes: Annotated[
        float, typer.Option(min=0, help="No part is begun after them; a second call goes on.")
    ] = 8.0,
    page: Annotated[
        bool, typer.Option("--page", help="Only render all files of the folder as its README.md.")
    ] = False,
) -> None:
    """Run everything that wants a GPU on this one, and write what came out as one JSON file.

    Iterations at real sizes with random weights beside bare forwards and the memory plan, low-bit
    kernels with the agreement of their rankings, compilation, two-stage rollouts, the quickstarts
    for 10 iterations, rewards in processes, an all-reduce of all GPUs, and `pytest -m gpu`. A
    second call goes on where the first ended; parts that the minutes leave out are named. Without a
    GPU two blocks of each network run, which shows that the parts work. The exit code is 1 when a
    part failed.

    Examples:

      python -m scripts.bench certify

      python -m scripts.bench certify flux.1-dev-nft-24gb

      python -m scripts.bench certify --page
    """
    from scripts.bench.certify import certify as run
    from scripts.bench.certify import failed_parts, not_run_sentence, write_page

    if page:
        typer.echo(write_page(folder))
        typer.echo(f"{not_run_sentence(folder)}.")
        return
    path = run(folder, recipes=words or (), only=part or (), minutes=minutes, show=typer.echo)
    typer.echo(path)
    if failed_parts(path):
        raise typer.Exit(1)


def _print_costs(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print the phases, the results and the verdict of each row, or one JSON object."""
    from scripts.bench.two_stage import labelled, verdict

    if as_json:
        print_table(rows, as_json=True)
        return
    for row in rows:
        print_table(row["split"])
        print()
        print_table(labelled(row))
        print()
        print(verdict(row))


if __name__ == "__main__":
    app()

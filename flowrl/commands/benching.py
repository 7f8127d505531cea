"""`flowrl bench`: what things cost, as ratios of one run. One command a subject."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

Model = Annotated[str, typer.Option(help="A diffusers pipeline, or tiny-sd3.")]
Batch = Annotated[int, typer.Option(min=1, help="Most pictures in one forward.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; the best counts.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]


@app.callback()
def bench() -> None:
    """Measure what sampler, training and rewards cost, as ratios within one run.

    Examples:

      flowrl bench rollout --batch 64 --threads 1

      flowrl bench tree

      flowrl bench reward ocr
    """


@app.command()
def rollout(
    model: Model = "tiny-sd3",
    batch: Batch = 64,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 8,
    threads: Threads = 1,
    repeats: Repeats = 5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Sampler and update beyond the network's own passes.

    Example:

      flowrl bench rollout --batch 64 --threads 1
    """
    from flowrl.bench import bench_rollout
    from flowrl.commands.show import print_table

    rows = bench_rollout(
        model=model, batch=batch, steps=steps, threads=threads, repeats=repeats, device=device
    )
    print_table(rows, as_json=as_json)


@app.command()
def tree(
    model: Model = "tiny-sd3",
    batch: Batch = 64,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts drawn together.")] = 8,
    threads: Threads = 1,
    repeats: Repeats = 5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """16 pictures of a prompt as a tree against chains, and a pruned update.

    Next to it: what the plans' own counts predict.

    Example:

      flowrl bench tree
    """
    from flowrl.bench_tree import bench_tree
    from flowrl.commands.show import print_table

    rows = bench_tree(
        model=model, prompts=prompts, batch=batch, steps=steps, threads=threads, repeats=repeats,
        device=device,
    )  # fmt: skip
    print_table(rows, as_json=as_json)


@app.command()
def reward(
    name: Annotated[str, typer.Argument(help="Built-in name or module:attribute.")] = "ocr",
    pictures: Annotated[int, typer.Option(min=1, help="Pictures of one round.")] = 48,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Processes; may be repeated. Default 1 and 2.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Pictures of one question.")] = 4,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Pictures per second of a reward, in this process and in pools of one thread a process.

    A ratio is of pictures per second: above 1 is faster than what it is compared with.

    Example:

      flowrl bench reward ocr
    """
    from flowrl.bench_reward import bench_reward
    from flowrl.commands.show import print_table

    rows = bench_reward(
        name=name,
        pictures=pictures,
        workers=tuple(workers or (1, 2)),
        micro_batch=micro_batch,
        repeats=repeats,
    )
    print_table(rows, as_json=as_json)

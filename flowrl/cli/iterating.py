"""`flowrl bench iteration`: a whole iteration at real size, its speed and its memory."""

from typing import Annotated

import typer


def iteration(  # noqa: PLR0913  # an argument for each option
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="sd3.5-medium, sd3.5-large, flux.1-dev or sana-1.6b. May be repeated. Default all "
            "but sd3.5-large."
        ),
    ] = None,
    pixels: Annotated[
        int | None, typer.Option(help="A picture's side. Default 512, SANA 1024.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks of each kind, only to see that everything runs.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of the iteration.")] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Pictures of a prompt.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Denoising steps.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Most pictures in one forward of the rollout.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most forwards in one backward pass.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    precision: Annotated[
        str | None,
        typer.Option(help="Of frozen weights: fp8, nvfp4 and so on; see pipeline.precision."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Compute activations again in the backward pass.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """One iteration of Flow-GRPO on pipelines of real size with random weights.

    Seconds, pictures a second, the share of drawing that is spent in the transformer's forwards
    (0.90 or more are expected on a GPU), and the most memory of each phase beside what `flowrl
    plan` predicts for the same settings (within 10 % are expected). Text and rewards are noise.

    Wants a GPU, of 80 GB for FLUX.1. It has not been run on one yet.

    Examples:

      flowrl bench iteration --json

      flowrl bench iteration --size flux.1-dev --gradient-checkpointing

      flowrl bench iteration --size sana-1.6b --device cpu --layers 2 --pixels 64
    """
    from flowrl.bench.iteration import bench_iteration, work_of
    from flowrl.cli._console import print_table
    from flowrl.planning.sizes import size_of

    names = size or ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
    changes = {
        "prompts": prompts, "group_size": group_size, "steps": steps, "batch": batch,
        "micro_batch": micro_batch,
    }  # fmt: skip
    given = {name: value for name, value in changes.items() if value is not None}
    for name in names:
        size_of(name)  # all of them before the first is measured
    for name in names:
        row = bench_iteration(
            name=name, work=work_of(name, given), pixels=pixels, layers=layers, dtype=dtype,
            precision=precision, gradient_checkpointing=gradient_checkpointing, device=device,
        )  # fmt: skip
        if as_json:
            print_table([row], as_json=True)
            continue
        print_table(row.pop("phases"))
        print()
        print_table([{"what": what, "is": value} for what, value in row.items()])

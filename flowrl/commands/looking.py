"""`flowrl explain`, `flowrl doctor` and `flowrl bench`: commands that tell and change nothing."""

from typing import Annotated, Literal

import typer

from flowrl.errors import UserError

MARKS = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "problem": ("!!", "bold red")}


def explain(
    key: Annotated[str, typer.Argument(help="An option or section; none lists the sections.")] = "",
) -> None:
    """Say what an option means, what it takes, its default and where that comes from.

    Examples:

      flowrl explain rollout.noise_level

      flowrl explain rollout
    """
    from flowrl.explain import explain as text

    typer.echo(text(key))


def doctor() -> None:
    """Check versions, device and optional packages; say how to get what is missing.

    Reaches no network. Exits with 1 if something that a run needs is missing.
    """
    from rich.console import Console
    from rich.text import Text

    from flowrl.doctor import examine, healthy

    console = Console(soft_wrap=True, highlight=False)
    findings = examine()
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        mark, style = MARKS[finding.state]
        console.print(
            Text(mark, style=style) + Text(f"  {finding.topic:<{width}}  {finding.detail}")
        )
        if finding.remedy:
            console.print(Text(f"    {'':<{width}}  {finding.remedy}", style="dim"))
    if not healthy(findings):
        raise UserError(
            "Something that a run needs is missing; the lines marked !! say what to do."
        )


def bench(
    what: Annotated[Literal["rollout", "tree"], typer.Argument(help="What to measure.")] = (
        "rollout"
    ),
    model: Annotated[str, typer.Option(help="A diffusers pipeline, or tiny-sd3.")] = "tiny-sd3",
    batch: Annotated[int, typer.Option(min=1, help="Most pictures in one forward.")] = 64,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; 8 for rollout, 20 for tree.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="tree: prompts drawn together.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the best counts.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Measure what sampler and training cost, as ratios within one run.

    rollout: beyond the network's own passes. tree: 16 pictures of a prompt as a tree against
    chains, and a pruned update, beside what the plans' own counts say.

    Examples:

      flowrl bench rollout --batch 64 --threads 1

      flowrl bench tree
    """
    from flowrl.commands.show import print_table

    if what == "tree":
        from flowrl.bench_tree import bench_tree

        rows = bench_tree(
            model=model,
            prompts=prompts,
            batch=batch,
            steps=steps or 20,
            threads=threads,
            repeats=repeats,
            device=device,
        )
    else:
        from flowrl.bench import bench_rollout

        rows = bench_rollout(
            model=model,
            batch=batch,
            steps=steps or 8,
            threads=threads,
            repeats=repeats,
            device=device,
        )
    print_table(rows, as_json=as_json)

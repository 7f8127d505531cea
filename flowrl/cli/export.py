"""`flowrl export`: the LoRA of a run in the formats that other programs load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.errors import UserError


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|FILE", help="A run's folder, a checkpoint's, or a LoRA.")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", "-o", metavar="FOLDER|FILE", help="Where; not for hub.")
    ] = None,
    format: Annotated[
        Literal["diffusers", "comfyui", "merged", "hub"],
        typer.Option(
            help="diffusers: the LoRA as it is. comfyui: one file with ComfyUI's keys (SD3, FLUX). "
            "merged: the whole pipeline with the LoRA in its weights. hub: upload LoRA and card."
        ),
    ] = "diffusers",
    repo_id: Annotated[
        str | None,
        typer.Option("--repo-id", metavar="NAME", help="hub: repository; the run's name if left."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="hub: if it is new.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="PIPELINE", help="merged: instead of the run's own.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="merged: of the pipeline.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="merged: of the weights; the run's own, else bf16."),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="comfyui: sd3 or flux, for a file without its run.")
    ] = None,
) -> None:
    """Write a LoRA for diffusers or ComfyUI, merge it into its pipeline, or push it to the Hub.

    hub takes its token from HF_TOKEN or hf auth login, and uploads the LoRA, the card with its
    images and the configuration; never checkpoints.

    Examples:

      flowrl export runs/quickstart --to lora

      flowrl export runs/quickstart --format comfyui --to quickstart.safetensors

      flowrl export runs/quickstart --format merged --to merged

      flowrl export runs/quickstart --format hub --repo-id me/quickstart
    """
    of_format = {
        "hub": {"--repo-id": repo_id, "--private": private},
        "merged": {"--base": base, "--revision": revision, "--dtype": dtype},
        "comfyui": {"--backbone": backbone},
    }
    for other, options in of_format.items():
        for name, value in options.items():
            if value and other != format:
                raise UserError(
                    f"{name} is of --format {other}, but the format is {format}: leave {name} out, "
                    f"or give --format {other}."
                )
    if to is not None and format == "hub":
        raise UserError(f"--to {to} is given with --format hub, which uploads: leave it out.")
    if to is None and format != "hub":
        raise UserError(f"--format {format} needs --to, as in flowrl export {source} --to lora.")
    from flowrl.api import export as export_lora

    typer.echo(
        export_lora(
            source, to, format=format, repo_id=repo_id, private=private, base=base,
            revision=revision, dtype=dtype, backbone=backbone,
        )
    )  # fmt: skip

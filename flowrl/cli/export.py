"""`flowrl export`: the LoRA of a run in the formats that other programs load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli._console import LoraAlpha, starting
from flowrl.errors import UserError

# The formats that an option is for.
FILES = ("diffusers", "comfyui", "kohya", "merged")
OPTIONS: dict[str, tuple[str, ...]] = {
    "-o": FILES, "--base": FILES, "--revision": FILES, "--dtype": ("merged",),
    "--repo-id": ("hub",), "--private": ("hub",),
}  # fmt: skip


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE|HUB",
            help="A run's folder, a checkpoint's, or a LoRA of any program, also on the Hub.",
        ),
    ],
    to: Annotated[
        Literal["diffusers", "comfyui", "kohya", "merged", "hub"],
        typer.Option(
            help="diffusers: a file for diffusers. comfyui, kohya: one file with ComfyUI's or "
            "kohya's keys, for the families in the documentation. merged: the whole pipeline with "
            "the LoRA in its weights. hub: upload LoRA and card."
        ),
    ] = "diffusers",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER|FILE", help="Where.")
    ] = None,
    repo_id: Annotated[
        str | None,
        typer.Option("--repo-id", metavar="NAME", help="hub: repository; the run's name if left."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="hub: if it is new.")] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="PIPELINE", help="Pipeline of the LoRA, for a file without its run."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of --base on the Hub.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="merged: of the weights; the run's own, else bf16."),
    ] = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Write a LoRA for diffusers or ComfyUI, merge it into its pipeline, or push it to the Hub.

    hub takes its token from HF_TOKEN or hf auth login, and uploads the LoRA, the card with its
    images and the configuration; never checkpoints.

    Examples:

      flowrl export runs/quickstart -o lora

      flowrl export runs/quickstart --to comfyui -o quickstart.safetensors

      flowrl export runs/quickstart --to merged -o merged

      flowrl export OWNER/NAME/checkpoint-3/lora -o lora

      flowrl export runs/quickstart --to hub --repo-id me/quickstart
    """
    if output is None and to != "hub":
        raise UserError(f"{to} needs a place, as in flowrl export {source} --to {to} -o lora.")
    values = {
        "-o": output, "--base": base, "--revision": revision, "--dtype": dtype,
        "--repo-id": repo_id, "--private": private,
    }  # fmt: skip
    for name, value in values.items():
        if value and to not in OPTIONS[name]:
            raise UserError(
                f"{name} is for --to {' or '.join(OPTIONS[name])}, and the format is {to}: leave "
                f"{name} out."
            )
    with starting():
        from flowrl.export import formats

    if to == "hub" or output is None:
        result = formats.export_hub(source, repository=repo_id, private=private)
    elif to == "merged":
        result = formats.export_merged(
            source, output, base=base, revision=revision, dtype=dtype, alpha=lora_alpha
        )
    else:
        result = formats.export_lora(
            source, output, keys=to, base=base, revision=revision, alpha=lora_alpha
        )
    typer.echo(result)

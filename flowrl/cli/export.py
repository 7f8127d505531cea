"""`flowrl export`: the LoRA of a run in the formats that other programs load."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowrl.cli._console import LoraAlpha
from flowrl.errors import UserError

FORMATS = ("diffusers", "comfyui", "merged", "hub")
# The formats that an option is for.
OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(("--base", "--revision"), FORMATS[:3])
OPTIONS |= {"--dtype": ("merged",)} | dict.fromkeys(("--repo-id", "--private"), ("hub",))


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE|HUB",
            help="A run's folder, a checkpoint's, or a LoRA of any program, also on the Hub.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT|FOLDER|FILE", help="A format's name, as --format; or where, as -o."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER|FILE", help="Where.")
    ] = None,
    format: Annotated[
        Literal["diffusers", "comfyui", "merged", "hub"],
        typer.Option(
            help="diffusers: a file for diffusers. comfyui: one file with ComfyUI's keys (SD3, "
            "FLUX.1, FLUX.2, Qwen-Image, Z-Image). merged: the whole pipeline with the LoRA in its "
            "weights. hub: upload LoRA and card."
        ),
    ] = "diffusers",
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

      flowrl export runs/quickstart --to lora

      flowrl export runs/quickstart --to comfyui -o quickstart.safetensors

      flowrl export runs/quickstart --to merged -o merged

      flowrl export OWNER/NAME/checkpoint-3/lora --to diffusers -o lora

      flowrl export runs/quickstart --format hub --repo-id me/quickstart
    """
    format, place = _format_and_place(source, to, output, format)
    values = {
        "--repo-id": repo_id, "--private": private, "--dtype": dtype, "--base": base,
        "--revision": revision,
    }  # fmt: skip
    for name, value in values.items():
        formats = OPTIONS[name]
        if value and format not in formats:
            raise UserError(
                f"{name} is for --format {' or '.join(formats)}, but the format is {format}: leave "
                f"{name} out."
            )
    from flowrl.api import export as export_lora

    typer.echo(
        export_lora(
            source, place, format=format, repo_id=repo_id, private=private, base=base,
            revision=revision, dtype=dtype, lora_alpha=lora_alpha,
        )
    )  # fmt: skip


def _format_and_place(
    source: str, to: str | None, output: Path | None, format: str
) -> tuple[Any, Path | None]:
    """Return format and place: --to may name either. Raises UserError for too many or too few."""
    named = to if to in FORMATS else None
    if named is not None and format not in (named, FORMATS[0]):
        raise UserError(f"--to {to} and --format {format} name two formats: leave one out.")
    if named is None and to is not None and output is not None:
        raise UserError(f"--to {to} and -o {output} are two places: leave one out.")
    chosen, place = named or format, output if named or to is None else Path(to)
    if place is not None and chosen == "hub":
        raise UserError(f"{place} is given with --format hub, which uploads: leave it out.")
    if place is None and chosen != "hub":
        raise UserError(
            f"{chosen} needs a place, as in flowrl export {source} --to {chosen} -o lora."
        )
    return chosen, place

"""Where a pipeline comes from: built in, a folder, or the Hub."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.hub_errors import sentence
from flowrl.backbones.offload import place
from flowrl.errors import UserError

TINY = ("tiny-sd3", "tiny-flux", "tiny-sana")  # built in
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pipeline_path(path: str) -> str:
    """The folder of a built-in pipeline, or the path or Hub name as it is."""
    if path not in TINY:
        return path
    folder = resources.files("flowrl") / "assets" / path
    if not folder.is_dir():
        raise UserError(f"{path} is not installed with flowrl: make it with scripts/pretrain_tiny")
    return str(folder)


def load_pipeline(
    path: str,
    *,
    dtype: str,
    device: torch.device | str,
    revision: str | None = None,
    rounding: Any = None,
    away: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Any:
    """A diffusers pipeline on a device, with its own progress bars off.

    revision: of a pipeline from the Hub, which is asked with the environment's token. rounding:
    diffusers' quantization_config. away: how the names of components begin that stay on the CPU;
    without: names of those that are not loaded. Raises UserError when there is none at `path`,
    with what the Hub said in words, and for a revision of what is not from the Hub.
    """
    on_hub = path not in TINY and not Path(path).exists()
    if revision is not None and not on_hub:
        raise UserError(
            f"revision {revision!r} is given for {path!r}, which is a folder on this machine, but "
            "only pipelines from the Hub have revisions: leave it out, or set pipeline.revision "
            "to null"
        )
    from diffusers import DiffusionPipeline
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            pipeline_path(path),
            dtype=DTYPES[dtype],
            revision=revision,
            quantization_config=rounding,
            **dict.fromkeys(without),
        )
    except Exception as error:  # HTTP libraries have errors of their own, of no common class
        if on_hub and (told := sentence(error, path, revision)):
            raise UserError(f"cannot load the pipeline: {told}") from error
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise UserError(
            f"cannot load the pipeline {path!r}: {str(error).splitlines()[0]}; give a folder, a "
            f"Hub name that this machine can reach, or {', '.join(TINY)}"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.to(memory_format=torch.channels_last)  # its convolutions are faster for it
    return place(pipeline, torch.device(device), away)

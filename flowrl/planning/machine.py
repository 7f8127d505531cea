"""Check that this machine can run a recipe, before anything is downloaded or loaded."""

import importlib.util
import os
import shutil

import torch

from flowrl.backbones.loading import DTYPES
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.planning.model_specs import ModelSpec, spec_for

REAL = 2 * 10**9  # bytes of weights from which a pipeline needs a GPU


def check_machine(config: Config, *, insist: bool = False) -> None:
    """Check packages, the GPU and the machine's memory.

    Args:
        insist: Train without a GPU, and with too little memory.

    Raises:
        UserError: A tracker, a package, a GPU or memory is missing.
    """
    check_packages(config)
    if insist:
        return
    try:
        spec = spec_for(config.pipeline.path, config.pipeline.revision)
    except UserError:  # not downloaded yet, and none of the published ones
        return
    if spec.weights < REAL:
        return
    check_memory(config, spec)
    if not torch.cuda.is_available() and config.pipeline.device in (None, "auto", "cpu"):
        raise UserError(
            f"{config.pipeline.path} would run on this machine's CPU, for months: use a machine "
            "with a GPU, rehearse with --dry-run, or insist with --yes"
        )


def check_packages(config: Config) -> None:
    """Check packages of trackers, and the C compiler."""
    for name in config.run.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"run.trackers has {name}, which is not installed: pip install {name}")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    if config.pipeline.compile and not any(map(shutil.which, compilers)):
        raise UserError(
            "pipeline.compile needs a C compiler, and there is none: install gcc, or set "
            "pipeline.compile=false"
        )


def check_memory(config: Config, spec: ModelSpec) -> None:
    """Check that the machine's memory holds the transformer, which is read before it is moved."""
    import psutil

    size = spec.parameters * DTYPES[config.pipeline.dtype].itemsize
    total = psutil.virtual_memory().total
    if size > total:
        raise UserError(
            f"the transformer of {config.pipeline.path} has {size / 1e9:.0f} GB in "
            f"{config.pipeline.dtype}, and this machine's memory {total / 1e9:.0f} GB: use a "
            "smaller checkpoint or another machine, or insist with --yes"
        )

"""Check that this machine can run a recipe, before anything is downloaded or loaded."""

import importlib.util
import os
import shutil

import torch

from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.planning.model_specs import spec_for

REAL = 2 * 10**9  # bytes of weights from which a pipeline needs a GPU


def check_machine(config: Config, *, insist: bool = False) -> None:
    """Check packages and the GPU; `flowrl plan` compares memory.

    Args:
        insist: Train without a GPU.

    Raises:
        UserError: A tracker, a compiler or a GPU is missing.
    """
    for name in config.run.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"run.trackers has {name}, which is not installed: pip install {name}")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    if config.pipeline.compile and not any(map(shutil.which, compilers)):
        raise UserError(
            "pipeline.compile needs a C compiler, and there is none: install gcc, or set "
            "pipeline.compile=false"
        )
    if insist:
        return
    try:
        spec = spec_for(config.pipeline.path, config.pipeline.revision)
    except UserError:  # not downloaded yet, and none of the published ones
        return
    real = spec.weights >= REAL
    if real and not torch.cuda.is_available() and config.pipeline.device in (None, "auto", "cpu"):
        raise UserError(
            f"{config.pipeline.path} would run on this machine's CPU, for months: use a machine "
            "with a GPU, rehearse with --dry-run, or insist with --yes"
        )

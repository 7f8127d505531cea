"""From options to the precision that the network draws and learns in."""

from pathlib import Path

from flowrl.backbones.base import Backbone
from flowrl.config import Config
from flowrl.lowbit.backends import Backend, NVFP4Emulated, NVFP4Native, backend_of
from flowrl.lowbit.kernel_check import check_kernels
from flowrl.lowbit.per_row import PerRow
from flowrl.lowbit.precision import capability_of, resolve
from flowrl.lowbit.report import write_precision
from flowrl.lowbit.rules import choose_layers, rules_of
from flowrl.lowbit.training import quantise_base
from flowrl.runtime import Runtime

FILE = "training-precision.json"


def set_precision(config: Config, backbone: Backbone, runtime: Runtime) -> None:
    """Pack the network's frozen weights as `pipeline.precision` says, and tell; null is nothing.

    Before adapters are added. Raises UserError for a precision that the device lacks, layers that
    cannot be packed, and kernels that compute something else.
    """
    p = config.pipeline
    if p.precision is None:
        return
    network = backbone.transformer
    resolved = resolve(p.precision, capability_of(runtime.device))
    choices = ()
    if resolved.format != "bf16":
        choices = choose_layers(
            network, rules_of(network), resolved.format, min_dim=p.min_dim, keep=p.keep_layers
        )
    if runtime.is_main:
        folder = Path(config.run.output_dir)
        write_precision(folder, resolved, choices, what="rollouts and training are", file=FILE)
    if not choices:
        return
    backend = row_by_row(backend_of(resolved, dtype=backbone.dtype))
    shapes = {choice.shape for choice in choices if choice.format}
    check_kernels(backend, sorted(shapes), device=runtime.device, dtype=backbone.dtype)
    quantise_base(network, choices, backend)


def row_by_row(backend: Backend) -> Backend:
    """The same numbers whatever the batch: a rollout's and a micro-batch are seldom alike."""
    return PerRow(backend) if isinstance(backend, NVFP4Native | NVFP4Emulated) else backend

"""From options to the precision that the network draws and learns in."""

from pathlib import Path

from flowrl.backbones.base import Backbone
from flowrl.config import Config
from flowrl.quantization.backends import Backend, NVFP4Emulated, NVFP4Native
from flowrl.quantization.layer_rules import LayerRules
from flowrl.quantization.per_row import PerRow
from flowrl.quantization.precision import capability_of, resolve
from flowrl.quantization.prepare import prepare
from flowrl.quantization.report import write_precision
from flowrl.quantization.training import quantise_base
from flowrl.utils.distributed import Runtime

FILE = "training-precision.json"
WHERE = "pipeline"  # the section of its options


def set_precision(config: Config, backbone: Backbone, runtime: Runtime) -> None:
    """Pack the network's frozen weights as `pipeline.precision` says, and tell; null is nothing.

    Before adapters are added. Raises UserError for a precision that the device lacks, layers that
    cannot be packed, and kernels that compute something else.
    """
    p = config.pipeline
    if p.precision is None:
        return
    resolved = resolve(p.precision, capability_of(runtime.device), where=WHERE)
    choices, backend = prepare(
        backbone.transformer,
        resolved,
        dtype=backbone.dtype,
        device=runtime.device,
        rules=layer_rules(backbone),
        min_dim=p.min_dim,
        keep=p.keep_layers,
        convolutions=False,
        where=WHERE,
    )
    if runtime.is_main:
        write_precision(
            Path(config.run.output_dir),
            resolved,
            choices,
            dtype=backbone.dtype,
            what="rollouts and training",
            lora="side",
            file=FILE,
        )
    quantise_base(backbone.transformer, choices, row_by_row(backend))


def layer_rules(backbone: Backbone) -> LayerRules | None:
    """What a backbone of somebody's own says of its layers, if it does."""
    return getattr(backbone, "layer_rules", None)


def row_by_row(backend: Backend) -> Backend:
    """The same numbers whatever the batch: a rollout's and a micro-batch are seldom alike."""
    return PerRow(backend) if isinstance(backend, NVFP4Native | NVFP4Emulated) else backend

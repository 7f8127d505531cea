"""Frozen weights in 8 bits (torchao) or 4 (bitsandbytes) below exact adapters, to save memory.

`flowrl.quantization` makes matmuls fast; this makes weights small. They are rounded once, as they
are loaded, for both rollouts and training.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

from flowrl.config.sections import MemoryOptions
from flowrl.errors import UserError


def check_base_bits(memory: MemoryOptions, device: torch.device) -> None:
    """Raise UserError when the library is missing, or the device cannot run it."""
    if memory.base_bits == 4 and device.type == "cpu":
        raise UserError(
            "memory.base_bits is 4 with bitsandbytes, which diffusers runs on GPUs alone: on the "
            "CPU set it to 8 or null"
        )
    library = "bitsandbytes" if memory.base_bits == 4 else "torchao"
    if importlib.util.find_spec(library) is None:
        raise UserError(
            f"memory.base_bits is {memory.base_bits}, which needs {library}: from a clone of the "
            f'project, pip install ".[{library}]"'
        )


def loading_config(memory: MemoryOptions, dtype: torch.dtype) -> Any:
    """Return a `PipelineQuantizationConfig` for the transformer's linear layers.

    dtype: of the matmuls, and of what stays exact.
    """
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

    if memory.base_bits == 8:
        from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return PipelineQuantizationConfig(quant_mapping={"transformer": config})


def is_quantised(network: nn.Module) -> bool:
    """Whether some weight is kept in another format than floating-point numbers."""
    return any(not is_plain(weight) for weight in network.parameters())


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight is not quantised: bitsandbytes keeps integers, torchao a tensor subclass."""
    library = type(weight.data).__module__.partition(".")[0]
    return weight.is_floating_point() and weight.dtype.itemsize > 1 and library != "torchao"


def check_mergeable(weight: torch.Tensor) -> None:
    """Raise UserError for a quantised weight, to which nothing can be added."""
    if not is_plain(weight):
        raise UserError(
            "a LoRA cannot be folded into weights of 8 or 4 bits, which would round it away: set "
            "rollout.merge_lora to auto or false in a recipe, or load the pipeline in 16 or 32 bits"
        )

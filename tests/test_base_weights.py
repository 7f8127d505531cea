"""Frozen weights in few bits: smaller, close, below adapters that train; and what is refused."""

import importlib.util
import re

import pytest
import torch

from flowrl import base_weights
from flowrl.base_weights import (
    BaseBits,
    check_base_bits,
    is_plain,
    is_rounded,
    round_in_place,
)
from flowrl.build import Given, build_learner
from flowrl.build_memory import build_pipeline
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.export import load_lora, read_lora, save_lora
from flowrl.lowbit.backends import Plain
from flowrl.lowbit.twin import Twin
from flowrl.policy import POLICY
from flowrl.runtime import Runtime
from flowrl.train import train_iteration

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EIGHT = {"base_bits": 8, "base_library": "torchao"}
INT8 = BaseBits(bits=8, library="torchao")


def held(network):
    """Bytes of the linear layers' weights, as they are kept."""
    parts = []
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            names = getattr(weight, "tensor_data_names", None)
            parts += [getattr(weight, n) for n in names] if names else [weight]
    return sum(part.numel() * part.element_size() for part in parts)

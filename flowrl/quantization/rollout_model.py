"""`RolloutModel`: a low-bit copy of the policy's network, which shares its frozen weights.

The copy has the LoRA either merged, W + s B A summed in fp32 and packed straight from there, or as
a path beside the packed base, Q(W) x + s B (A x). `prepare` chooses its layers and backend.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.backbones.compiling import compile_blocks
from flowrl.backbones.families import layer_rules_of
from flowrl.backbones.policy import POLICY, Policy, merged_weight
from flowrl.backbones.quantized_base import check_mergeable
from flowrl.config.rollout import Precision
from flowrl.errors import UserError
from flowrl.quantization.backends import BACKENDS, Backend, check_kernels
from flowrl.quantization.layer_rules import (
    LayerChoice,
    choose_layers,
    is_pointwise,
    quantised_share,
)
from flowrl.quantization.linear import RolloutLinear, SamePrecisionLinear

LOG = logging.getLogger(__name__)


class RolloutModel:
    """A copy of the policy's network for sampling, `network`; it never computes gradients.

    It begins with the policy's adapter; call `sync` before every rollout. Which adapter the
    policy's own network uses in the meantime changes nothing here. The copy does not follow the
    policy to another device or dtype.

    Args:
        choices: those to be quantised are packed by `backend`, once where no adapter changes
            them. Other adapted layers hold a merged copy in their own dtype; without choices
            the copy is exact and needs no backend. Everything else is the policy's own tensors.
        compile: the repeated blocks, see `compile_blocks`; "graphs" as CUDA graphs.

    Raises:
        UserError: a layer to be merged is trained in low precision itself.
    """

    def __init__(
        self,
        policy: Policy,
        choices: Sequence[LayerChoice] = (),
        backend: Backend | None = None,
        *,
        compile: bool | Literal["graphs"] = False,
    ):
        from peft.tuners.lora import LoraLayer

        self.policy, self.choices = policy, tuple(choices)
        tensors = (*policy.network.parameters(), *policy.network.buffers())
        # Of the modules, adapters included, around the same tensors.
        self.network = copy.deepcopy(policy.network, {id(tensor): tensor for tensor in tensors})
        self._adapted: list[_Adapted] = []
        packed = {c.name: backend for c in choices if c.quantised}
        adapted = {
            name: module
            for name, module in policy.network.named_modules()
            if isinstance(module, LoraLayer) and POLICY in module.lora_A
        }
        for name in dict.fromkeys((*adapted, *packed)):
            layer = self._layer(name, adapted.get(name), packed.get(name))
            parent, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(parent), last, layer)
        if compile:
            compile_blocks(self.network, graphs=compile == "graphs")

    @torch.no_grad()
    def sync(self, adapter: str) -> None:
        """Copy one of the policy's adapters into this network, in place: every address stays."""
        for one in self._adapted:
            merged = merged_weight(one.lora, one.weight, adapter)
            if isinstance(one.layer, RolloutLinear):
                one.layer.load(merged)
            else:
                one.layer.weight.copy_(merged)

    @torch.no_grad()
    def _layer(self, name: str, lora: Any | None, backend: Backend | None) -> nn.Module:
        base: Any = self.policy.network.get_submodule(name)
        base = base.get_base_layer() if lora else base
        # Not the parameter: `Policy.merged` swaps what that holds.
        weight = base.weight.detach()
        check_mergeable(base.weight)  # nor packed
        merged = merged_weight(lora, weight, POLICY) if lora else None
        if backend is None:
            assert merged is not None  # a layer is here to be packed or for its adapter
            adapted: Any = self.network.get_submodule(name)
            layer = _exact(name, adapted.get_base_layer(), merged)
        else:
            layer = RolloutLinear(
                weight if merged is None else merged,
                base.bias,
                backend,
                pointwise=is_pointwise(base),
            )
        if lora is not None:
            self._adapted.append(_Adapted(layer=layer, lora=lora, weight=weight))
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    layer: Any  # of the copy
    lora: Any  # PEFT's layer in the policy's network
    weight: Tensor  # its frozen weight


def _exact(name: str, layer: Any, weight: Tensor) -> nn.Module:
    """Give a copied layer a weight of its own."""
    if isinstance(layer, SamePrecisionLinear):
        raise UserError(
            f"layer {name} is trained in low precision, with its adapter beside packed weights: "
            "nothing can be merged into those"
        )
    layer.weight = nn.Parameter(weight.to(layer.weight.dtype), requires_grad=False)
    return layer


# --- a precision on a network ---------------------------------------------------------------------


def prepare(
    network: nn.Module,
    precision: Precision,
    *,
    dtype: torch.dtype,
    device: torch.device,
    min_dim: int | None,
    convolutions: bool = True,
) -> tuple[tuple[LayerChoice, ...], Backend | None]:
    """Choose the layers that a precision quantises, and their backend; none for bf16.

    Args:
        dtype: the network's own.
        min_dim: see `choose_layers`.
        convolutions: False keeps 1x1 ones exact: low-bit ones sample, but do not train.

    Raises:
        UserError: no layer can be quantised, nothing says which, or a kernel disagrees with its
            emulation.
    """
    if precision == "bf16":
        return (), None
    backend = BACKENDS[precision]
    rules = layer_rules_of(network)
    rules = rules if convolutions else replace(rules, pointwise=False)
    choices = choose_layers(network, rules, min_dim=min_dim)
    shapes = {choice.shape for choice in choices if choice.quantised}
    check_kernels(backend, shapes, device, dtype)
    return choices, backend


def log_precision(what: str, precision: Precision, choices: Sequence[LayerChoice]) -> None:
    """Log the precision of `what`, and for --debug what becomes of each layer.

    choices: empty where nothing is quantised.
    """
    name = "not quantised" if precision == "bf16" else precision
    part = f"; {quantised_share(choices):.0%} of the weights of its layers" if choices else ""
    LOG.info("precision of %s: %s%s", what, name, part)
    for choice in choices:
        LOG.debug("%s: %s", choice.name, precision if choice.quantised else "exact")

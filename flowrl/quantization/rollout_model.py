"""A second network for rollouts that shares the policy's frozen weights and follows its adapters.

The two ways to have a LoRA in it: merged, W + s B A summed in fp32 and packed straight from
there, or as a path beside the packed base, Q(W) x + s B (A x).
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.backbones.policy import POLICY, Policy, merged_weight
from flowrl.backbones.quantized_base import check_mergeable
from flowrl.errors import UserError
from flowrl.quantization.backends import Backend, Plain, State
from flowrl.quantization.compiling import compile_network
from flowrl.quantization.layer_rules import LayerChoice, is_pointwise
from flowrl.quantization.linear import RolloutLinear
from flowrl.quantization.training import SamePrecisionLinear


class Twin:
    """The policy's network with other products in it, `network`; it never computes gradients.

    choices: layers with a format are packed by `backend`, once where no adapter changes them.
    Adapted layers without a format hold a merged copy in their own dtype, or with lora="side" have
    the path beside the frozen weight; no choices make an exact twin. Everything else is the
    policy's own tensors. compile: by torch.compile, once for each shape of the latents.
    Begins with the policy's adapter; `sync` before every rollout. Whether the policy's network is
    switched to another adapter, to none or to merged weights in the meantime changes nothing here.
    Made where the network is to stay: it does not follow it to another device or dtype.
    Raises UserError when a layer to be packed, or to have a path beside it, is neither linear nor
    a 1x1 convolution, and when one is to be merged that is trained in low precision itself.
    """

    def __init__(
        self,
        policy: Policy,
        choices: Sequence[LayerChoice],
        backend: Backend,
        *,
        lora: Literal["merge", "side"] = "merge",
        compile: bool = False,
    ):
        self.policy, self.choices, self.lora = policy, tuple(choices), lora
        self.network = sharing_copy(policy.network)
        self._adapted: list[_Adapted] = []
        formats = {c.name: backend for c in choices if c.format is not None}
        adapted = dict(_adapted_layers(policy.network))
        for name in dict.fromkeys((*adapted, *formats)):
            layer = self._layer(name, adapted.get(name), formats.get(name))
            parent, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(parent), last, layer)
        if compile:
            compile_network(self.network)
        self.version = 0

    @torch.no_grad()
    def sync(self, adapter: str) -> None:
        """Take the weights of one of the policy's adapters, in place: every address stays.

        Raises ValueError for an adapter that the policy does not have.
        """
        for one in self._adapted:
            if adapter not in one.lora.lora_A:
                raise ValueError(f"the policy has no adapter {adapter!r}: {[*one.lora.lora_A]}")
            if not isinstance(one.layer, RolloutLinear):
                one.layer.weight.copy_(merged_weight(one.lora, one.weight, adapter))
            elif self.lora == "merge":
                one.layer.load(merged_weight(one.lora, one.weight, adapter))
            else:
                one.layer.load_side(*_factors(one.lora, adapter))
        self.version += 1

    def nbytes(self) -> int:
        """What the twin holds beside the policy's own tensors."""
        shared = {t.untyped_storage().data_ptr() for t in _tensors(self.policy.network)}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(self.network)}
        return sum(storage.nbytes() for start, storage in own.items() if start not in shared)

    @torch.no_grad()
    def _layer(self, name: str, lora: Any | None, backend: Backend | None) -> nn.Module:
        base: Any = self.policy.network.get_submodule(name)
        base = base.get_base_layer() if lora else base
        # Not the parameter: `Policy.merged` swaps what that holds.
        weight = base.weight.detach()
        check_mergeable(base.weight)  # nor packed, or put beside an adapter of its own
        merged = merged_weight(lora, weight, POLICY) if lora and self.lora == "merge" else None
        if backend is None and merged is not None:
            own: Any = self.network.get_submodule(name)
            layer = _exact(name, own.get_base_layer(), merged)
        else:
            layer = RolloutLinear(
                weight if merged is None else merged,
                base.bias,
                backend or _own_backend(base),
                side=_side(lora) if lora and merged is None else None,
                pointwise=_checked(name, base),
                shared=backend is None,
                packed=_packed_already(base, backend) if merged is None else None,
            )
        if lora is not None:
            self._adapted.append(_Adapted(layer=layer, lora=lora, weight=weight))
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """A layer of the twin, PEFT's layer that it follows, and the frozen weight of that."""

    layer: Any
    lora: Any
    weight: Tensor


def sharing_copy(network: nn.Module) -> nn.Module:
    """The same modules again over the same parameters and buffers, adapters and all."""
    return copy.deepcopy(network, {id(tensor): tensor for tensor in _tensors(network)})


def _exact(name: str, layer: Any, weight: Tensor) -> nn.Module:
    """The layer itself, a copy already, with a weight of its own."""
    if isinstance(layer, SamePrecisionLinear):
        raise UserError(
            f"layer {name} is trained in low precision, with its adapter beside packed weights: "
            "nothing can be merged into those, have the adapter beside them in rollouts too"
        )
    layer.weight = nn.Parameter(weight.to(layer.weight.dtype), requires_grad=False)
    return layer


def _checked(name: str, layer: nn.Module) -> bool:
    """Whether it is a 1x1 convolution. Raises UserError when it is no linear layer either."""
    if is_pointwise(layer):
        return True
    if type(layer) in (nn.Linear, SamePrecisionLinear):
        return False
    raise UserError(
        f"layer {name} is a {type(layer).__name__}, which can neither be quantised nor have its "
        "adapter beside it: leave it out of lora.targets, or merge and keep it exact"
    )


def _own_backend(layer: Any) -> Backend:
    """How a layer computes in the policy's network."""
    if isinstance(layer, SamePrecisionLinear):
        return layer.packed.backend
    return Plain(layer.weight.dtype)


def _packed_already(layer: Any, backend: Backend | None) -> State | None:
    """What a layer trained in low precision holds, if it computes in the same way."""
    if isinstance(layer, SamePrecisionLinear) and backend in (None, layer.packed.backend):
        return layer.packed.state()
    return None


def _adapted_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers by name, as far as the policy's adapter is on them."""
    from peft.tuners.lora import LoraLayer

    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and POLICY in module.lora_A:
            yield name, module


def _side(lora: Any) -> tuple[Tensor, Tensor, float]:
    return (*_factors(lora, POLICY), lora.scaling[POLICY])


def _factors(lora: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r), of a 1x1 convolution too."""
    a, b = lora.lora_A[adapter].weight, lora.lora_B[adapter].weight
    return a.detach().flatten(1), b.detach().flatten(1)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()

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

from flowrl.backbones.base import Backbone
from flowrl.errors import UserError
from flowrl.lowbit.backends import Backend, Plain
from flowrl.lowbit.compiling import compile_network
from flowrl.lowbit.linear import RolloutLinear
from flowrl.lowbit.rules import LayerChoice, is_pointwise
from flowrl.policy import POLICY, Policy
from flowrl.trajectory import Conditioning


class Twin:
    """The policy's network with other linear layers; it computes velocities, never gradients.

    choices: layers with a format are packed by `backend`, once where no adapter changes them;
    no choices make an exact twin. Adapted layers without a format hold a merged copy in their own
    dtype, or with lora="side" share the frozen weight. Everything else is the policy's own
    tensors. compile: by torch.compile, once for each shape of the latents.
    Begins with the policy's adapter; `sync` before every rollout. Whether the policy's network is
    switched to another adapter, to none or to merged weights in the meantime changes nothing here.
    Made where the network is to stay: it does not follow it to another device or dtype.
    Raises UserError when a layer that is adapted or chosen is neither linear nor a 1x1 convolution.
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
            layer = self._replace(name, adapted.get(name), formats.get(name))
            parent, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(parent), last, layer)
        if compile:
            compile_network(self.network)
        self.backbone: Backbone = copy.copy(policy.backbone)
        self.backbone.transformer = self.network
        self.version = 0

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Of the adapter that was synced last."""
        return self.backbone.velocity(x, sigma, cond)

    @torch.no_grad()
    def sync(self, adapter: str) -> None:
        """Take the weights of one of the policy's adapters, in place: every address stays.

        Raises ValueError for an adapter that the policy does not have.
        """
        for one in self._adapted:
            if adapter not in one.lora.lora_A:
                raise ValueError(f"the policy has no adapter {adapter!r}: {[*one.lora.lora_A]}")
            if self.lora == "merge":
                one.layer.load(_merged(one.lora, one.weight, adapter))
            else:
                one.layer.load_side(*_factors(one.lora, adapter))
        self.version += 1

    def nbytes(self) -> int:
        """What the twin holds beside the policy's own tensors."""
        shared = {t.untyped_storage().data_ptr() for t in _tensors(self.policy.network)}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(self.network)}
        return sum(storage.nbytes() for start, storage in own.items() if start not in shared)

    @torch.no_grad()
    def _replace(self, name: str, lora: Any | None, backend: Backend | None) -> RolloutLinear:
        base = lora.get_base_layer() if lora else self.policy.network.get_submodule(name)
        if type(base) is not nn.Linear and not is_pointwise(base):
            raise UserError(
                f"layer {name} is a {type(base).__name__}: rollouts have linear layers and 1x1 "
                "convolutions of their own, no others; leave it out of lora.targets or keep it"
            )
        # Not the parameter: `Policy.merged` swaps what that holds.
        weight = base.weight.detach()
        merge, side = lora is not None and self.lora == "merge", None
        if lora is not None and not merge:
            side = (*_factors(lora, POLICY), lora.scaling[POLICY])
        layer = RolloutLinear(
            _merged(lora, weight, POLICY) if merge else weight,
            base.bias,
            backend or Plain(weight.dtype),
            side=side,
            pointwise=not isinstance(base, nn.Linear),
            shared=backend is None and not merge,
        )
        if lora is not None:
            self._adapted.append(_Adapted(layer=layer, lora=lora, weight=weight))
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """A layer of the twin, PEFT's layer that it follows, and the frozen weight of that."""

    layer: RolloutLinear
    lora: Any
    weight: Tensor


def sharing_copy(network: nn.Module) -> nn.Module:
    """The same modules again over the same parameters and buffers, adapters and all."""
    return copy.deepcopy(network, {id(tensor): tensor for tensor in _tensors(network)})


def _adapted_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers by name, as far as the policy's adapter is on them."""
    from peft.tuners.lora import LoraLayer

    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and POLICY in module.lora_A:
            yield name, module


def _merged(lora: Any, weight: Tensor, adapter: str) -> Tensor:
    """W + s B A in fp32, under autocast too; shaped like the weight."""
    with torch.autocast(weight.device.type, enabled=False):
        return weight.float() + lora.get_delta_weight(adapter)


def _factors(lora: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r), of a 1x1 convolution too."""
    a, b = lora.lora_A[adapter].weight, lora.lora_B[adapter].weight
    return a.detach().flatten(1), b.detach().flatten(1)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()

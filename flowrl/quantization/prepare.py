"""A precision on a network: which of its layers, by which product, and that this one is right."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from flowrl.quantization.backends import Backend, backend_of
from flowrl.quantization.kernel_check import check_kernels
from flowrl.quantization.layer_rules import LayerChoice, LayerRules, choose_layers, rules_of
from flowrl.quantization.precision import Resolved


def prepare(
    network: nn.Module,
    resolved: Resolved,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rules: LayerRules | None = None,
    min_dim: int | None,
    keep: Sequence[str] | None = None,
    four_over_six: bool = False,
    convolutions: bool = True,
    where: str = "",
) -> tuple[tuple[LayerChoice, ...], Backend]:
    """The network's layers with those that a precision quantises, none for bf16, and how.

    dtype: the network's own. rules: the backbone's own, None for those of the network's class.
    min_dim, keep, where: see `choose_layers`. convolutions: False keeps SANA's 1x1 ones exact,
    which can be drawn with in few bits, and not learned through. Raises UserError where no layer
    can be quantised or nothing says which, and for a kernel that computes otherwise than its
    emulation does.
    """
    backend = backend_of(resolved, dtype=dtype, four_over_six=four_over_six)
    if resolved.format == "bf16":
        return (), backend
    rules = rules_of(network, rules, min_dim=min_dim, keep=keep, where=where)
    rules = rules if convolutions else replace(rules, pointwise=False)
    choices = choose_layers(
        network, rules, resolved.format, min_dim=min_dim, keep=keep, where=where
    )
    shapes = {choice.shape for choice in choices if choice.format}
    check_kernels(backend, shapes, device, dtype)
    return choices, backend

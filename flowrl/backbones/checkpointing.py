"""Gradient checkpointing, by diffusers' own switch."""

from typing import Any

from flowrl.errors import UserError


def recompute_blocks(network: Any) -> None:
    """Have a diffusers transformer keep only the inputs of its blocks for the backward pass, which
    computes each block again; without gradients nothing changes. The gradients are the same.

    Raises UserError for a network that cannot.
    """
    if not getattr(network, "_supports_gradient_checkpointing", False):
        raise UserError(
            f"memory.gradient_checkpointing is true, but {type(network).__name__} has no such "
            "switch: set it to false"
        )
    network.enable_gradient_checkpointing()

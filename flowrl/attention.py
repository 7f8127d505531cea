"""Who computes a network's attention: diffusers' back ends, by diffusers' own switch."""

from typing import Any

import torch

from flowrl.errors import UserError

NATIVE = "native"  # torch's scaled_dot_product_attention
ANYWHERE = (NATIVE, "_native_math", "flex")  # the others need an accelerator


def set_attention(network: Any, name: str, device: torch.device) -> None:
    """Have a diffusers transformer compute its attention by one back end, in rollouts as in
    training; copies of the network keep it.

    Raises UserError for a name that diffusers does not know, a back end that the device cannot run
    or whose library is missing, and a network whose layers do not look at diffusers' switch: of
    0.42's transformers FLUX does, SD3 and SANA always call torch's own function.
    """
    name = name.lower()
    known = _names()
    if name not in known:
        raise UserError(
            f"pipeline.attention is {name!r}, expected null or a back end of diffusers: "
            f"{', '.join(n for n in known if not n.startswith('_'))}"
        )
    if name not in ANYWHERE and device.type == "cpu":
        raise UserError(
            f"pipeline.attention is {name!r}, which needs a GPU, and this run is on the CPU: set "
            f"it to {NATIVE} or null"
        )
    if not _switchable(network):
        if name == NATIVE:
            return
        raise UserError(
            f"pipeline.attention is {name!r}, but diffusers' {type(network).__name__} always "
            "computes attention by torch's scaled_dot_product_attention, which takes a flash "
            f"kernel by itself where there is one: set it to {NATIVE} or null"
        )
    try:
        network.set_attention_backend(name)
    except (RuntimeError, ImportError) as error:  # in diffusers' words, which name the package
        raise UserError(
            f"pipeline.attention is {name!r}, which cannot be used here: "
            f"{str(error).splitlines()[0].rstrip('.')}; or set it to {NATIVE} or null"
        ) from error


def _names() -> list[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return [member.value for member in AttentionBackendName]


def _switchable(network: Any) -> bool:
    processors = (getattr(module, "processor", None) for module in network.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)

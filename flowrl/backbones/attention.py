"""Who computes a network's attention: diffusers' back ends, by diffusers' own switches."""

from typing import Any

import torch

from flowrl.errors import UserError

NATIVE = "native"  # torch's scaled_dot_product_attention
XFORMERS = "xformers"
ANYWHERE = (NATIVE, "_native_math", "flex")  # the others need an accelerator


def set_attention(network: Any, name: str, device: torch.device) -> None:
    """Have a diffusers transformer compute its attention by one back end, in rollouts as in
    training; copies of the network keep it.

    diffusers also takes the choice as the process's own, for every network that was told none.
    Raises UserError for a name that diffusers does not know, a back end that the device cannot run
    or whose library is missing, and a network that cannot be told: of 0.42's transformers FLUX
    looks at diffusers' switch for back ends, SD3 has an older one for xformers alone, and SANA
    always calls torch's own function.
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
    switchable, joint = _switchable(network), _joint(network)
    if not switchable and name == NATIVE:
        return
    if not switchable and not (joint and name == XFORMERS):
        raise UserError(
            f"pipeline.attention is {name!r}, but diffusers' {type(network).__name__} "
            "computes attention by torch's scaled_dot_product_attention, which takes a flash "
            f"kernel by itself where there is one: set it to {NATIVE} or null"
            + f", or to {XFORMERS}"
            * joint
        )
    try:
        if switchable:
            network.set_attention_backend(name)
        else:
            network.enable_xformers_memory_efficient_attention()
    # In diffusers' words, which name the package; a ValueError of xformers where no GPU is.
    except (RuntimeError, ImportError, ValueError) as error:
        raise UserError(
            f"pipeline.attention is {name!r}, which cannot be used here: "
            f"{str(error).splitlines()[0].rstrip('.')}; or set it to {NATIVE} or null"
        ) from error


def _names() -> list[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return [member.value for member in AttentionBackendName]


def _switchable(network: Any) -> bool:
    return any(hasattr(processor, "_attention_backend") for processor in _processors(network))


def _joint(network: Any) -> bool:
    """Whether all layers attend as SD3's do, whose processor alone has a twin of xformers that
    computes the same: SANA's linear attention would be replaced by another function."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    found = _processors(network)
    return bool(found) and all(isinstance(p, JointAttnProcessor2_0) for p in found)


def _processors(network: Any) -> list[Any]:
    found = (getattr(module, "processor", None) for module in network.modules())
    return [processor for processor in found if processor is not None]

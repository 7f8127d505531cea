"""LoRA guidance (RLG, 2508.21016): choose the strength of a LoRA when sampling.

The velocity is v_ref + strength (v - v_ref), where v is the denoiser's with the LoRA and v_ref
without. This is a heuristic. The samples follow p_ref^(1 - strength) p^strength, as if the reward
had been weighted `strength` times as much, only where the LoRA shifts the distribution without
changing its shape; otherwise a strength above 1 is a guess that images have to confirm.

The two are combined at each forward, which is the same as to give each its own classifier-free
guidance first and to combine then: both are linear. So are the changes between velocity, noise
and clean latent at one point, hence networks that predict either are served alike.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from flowrl.backbones.policy import switched_off
from flowrl.errors import UserError
from flowrl.functional.sde import extrapolate

DENOISERS = ("transformer", "transformer_2", "unet")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@contextmanager
def RLG(pipeline: Any, strength: float = 1.5) -> Iterator[None]:
    """Guide inside the block: `with RLG(pipe, strength=1.5): pipe(prompt)`.

    All active adapters of a diffusers pipeline count as the LoRA. On exit the pipeline is as it
    was.

    Args:
        strength: 0 is the base and 1 the pipeline with its LoRA, both bit for bit and in one
            forward; any other number, also a negative one, takes two.

    Raises:
        UserError: when there is no LoRA, or the base could not be computed exactly.
    """
    if not math.isfinite(strength):
        raise UserError(f"the strength of RLG is {strength}, expected a finite number")
    with ExitStack() as exits:
        for network in denoisers(pipeline):
            layers = adapters(network)
            if strength == 0:
                exits.enter_context(switched_off(layers))
            elif strength != 1:
                hook = partial(_guide, layers, strength)
                exits.callback(network.register_forward_hook(hook, with_kwargs=True).remove)
                # A network that is compiled as a whole would not notice the hook.
                compiled = network._compiled_call_impl
                exits.callback(setattr, network, "_compiled_call_impl", compiled)
                network._compiled_call_impl = None
        yield


def denoisers(pipeline: Any) -> list[nn.Module]:
    """Return the networks with a LoRA, after checking that it can be switched off."""
    parts = ((name, getattr(pipeline, name, None)) for name in (*DENOISERS, *ENCODERS))
    adapted = {name: part for name, part in parts if part is not None and adapters(part)}
    networks = [adapted[name] for name in DENOISERS if name in adapted]
    if not networks:
        raise UserError(
            f"{type(pipeline).__name__} has no active LoRA on {', '.join(DENOISERS)}, expected one "
            "to guide by: call pipe.load_lora_weights(...) before, or pipe.enable_lora()"
        )
    for name, part in adapted.items():
        if name in ENCODERS:
            raise UserError(
                f"the LoRA also adapts {name}, but it can be switched off in a denoiser only: "
                f"unload the LoRA from {name}"
            )
        _check(name, part)
    return networks


def _check(name: str, network: nn.Module) -> None:
    if any(getattr(hook, "func", None) is _guide for hook in network._forward_hooks.values()):
        raise UserError(f"RLG is already at work on {name}: leave its block before another")
    if any(layer.merged for layer in adapters(network)):
        raise UserError(
            f"the LoRA is fused into {name}, expected it beside the weights: reload the pipeline, "
            "or call pipe.unfuse_lora() if its rounding is no matter"
        )
    if getattr(network, "is_cache_enabled", False):
        raise UserError(
            f"{name} reuses results between calls, and RLG would mix those with and without LoRA: "
            f"call pipe.{name}.disable_cache()"
        )


def _guide(
    layers: list[Any], strength: float, network: nn.Module, args: Any, kwargs: Any, aligned: Any
) -> Any:
    """Call the network again without LoRA in a hook of its forward, and combine both results.

    Whatever replaces `forward`, as offloading does between images, stays below it.
    """
    with switched_off(layers):
        base = network.forward(*args, **kwargs)
    return _combine(base, aligned, strength)


def _combine(base: Any, aligned: Any, strength: float) -> Any:
    """Extrapolate a tensor, a list, or the first entry of a tuple or diffusers output class."""
    if isinstance(aligned, Tensor):
        return extrapolate(base, aligned, strength)
    if isinstance(aligned, list):
        return [_combine(b, a, strength) for b, a in zip(base, aligned, strict=True)]
    if isinstance(aligned, tuple):
        return (_combine(base[0], aligned[0], strength), *aligned[1:])
    first = next(iter(aligned))
    return type(aligned)(**aligned | {first: _combine(base[first], aligned[first], strength)})


def adapters(network: nn.Module) -> list[Any]:
    """Return the layers with an active adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in network.modules() if isinstance(module, BaseTunerLayer))
    return [layer for layer in layers if not layer.disable_adapters]

"""Arguments of a pipeline's call, by its signature and what is known of its family."""

import inspect
from typing import Any

from flowrl.backbones.families import SWITCHES, family_of
from flowrl.errors import UserError

DEFAULT_SIDE = 1024


def call_arguments(
    pipeline: Any,
    *,
    guidance: float,
    negative: str = "",
    max_sequence_length: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `pipeline(prompt, ...)` that generate as flowrl's backbone does.

    Args:
        guidance: The pipeline's own guidance, see `is_guided`.
        negative: The negative prompt, "" for none.
        max_sequence_length: Text tokens; None for the pipeline's default.
        height, width: Pixels; None for the size that the networks were made for.

    Raises:
        UserError: Guidance or a negative prompt that the pipeline would ignore.
    """
    name = type(pipeline).__name__
    family, parameters = family_of(name), inspect.signature(type(pipeline).__call__).parameters
    if guidance > 1 and family.guidance not in parameters:
        raise UserError(f"guidance is {guidance:g}, and {name} has none: leave it at 1")
    side = native_side(pipeline)
    call = {**SWITCHES, **family.call, "height": height or side, "width": width or side}
    call["max_sequence_length"] = max_sequence_length
    distilled = getattr(pipeline, "config", {}).get("is_distilled", False)
    guided = is_guided(name, guidance) and not distilled
    call[family.guidance] = guidance if guided or family.unguided is None else family.unguided
    if negative and ("negative_prompt" not in parameters or family.unguided is None):
        raise UserError(
            f"the negative prompt is {negative!r}, and flowrl gives {name} none: leave "
            "rollout.negative_prompt and the prompts' own empty"
        )
    if guided and family.unguided is not None:
        call["negative_prompt"] = negative
    return {
        key: value
        for key, value in call.items()
        if key in parameters and (value is not None or key in family.call)
    }


def is_guided(pipeline_class: str, guidance: float) -> bool:
    """Return whether a pipeline class makes a second forward for classifier-free guidance.

    The pipeline's own call combines the two.

    Up to 1 is none, for all classes. Where 0 is none, numbers between have no meaning here.

    Raises:
        UserError: A number between 0 and 1 for a class whose guidance begins at 0.
    """
    unguided = family_of(pipeline_class).unguided
    if unguided == 0 and 0 < guidance < 1:
        raise UserError(
            f"guidance is {guidance:g}, which {pipeline_class} has and flowrl does not train: take "
            "0 for none, or more than 1"
        )
    return unguided is not None and guidance > 1


def default_guidance(pipeline: Any) -> float:
    """Return the guidance of the pipeline's own call."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    family = family_of(type(pipeline).__name__)
    parameter = parameters.get(family.guidance)
    default = 1.0 if parameter is None else parameter.default
    return float(default) if isinstance(default, int | float) else 1.0


def native_side(pipeline: Any) -> int:
    """Return the pixels of a side that the networks were made for, 1024 where nothing says it."""
    network = getattr(pipeline, "transformer", None)
    factor = getattr(pipeline, "vae_scale_factor", 8)
    latent = getattr(getattr(network, "config", None), "sample_size", None)
    if isinstance(latent, int):
        return latent * factor
    pixels = getattr(getattr(getattr(pipeline, "vae", None), "config", None), "sample_size", None)
    if isinstance(pixels, int):
        return pixels
    default = getattr(pipeline, "default_sample_size", None)
    return default * factor if isinstance(default, int) else DEFAULT_SIDE

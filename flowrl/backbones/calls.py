"""What a pipeline's own call has to be told to draw as its backbone does."""

from typing import Any

from flowrl.backbones import flux, sana


def own_call(pipeline: Any, negative: str = "") -> dict[str, int]:
    """Arguments of `pipeline(...)`, where its defaults are not those of flowrl's backbone.

    FLUX.1 is asked for the size of its autoencoder and SANA for that of its network, drawn as it
    is, since the calls default to 1024 pixels; sizes of a recipe go on top. Raises UserError for a
    negative prompt that the pipeline would ignore.
    """
    kind = type(pipeline).__name__
    if kind == "FluxPipeline":
        flux.check_negatives([negative])
        return _square(flux.own_side(pipeline))
    if kind == "SanaPipeline":
        return _square(sana.own_side(pipeline)) | {"use_resolution_binning": False}
    return {}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}

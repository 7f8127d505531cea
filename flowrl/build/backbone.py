"""From options to a backbone around a pipeline, and to the layers of it that are adapted."""

from collections.abc import Callable
from typing import Any

from flowrl.backbones.base import Backbone, members_lacking
from flowrl.backbones.flux import Flux
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3, dual_targets
from flowrl.config import Config
from flowrl.config.sections import Lora
from flowrl.errors import UserError
from flowrl.utils.imports import load_callable

BACKBONES: dict[str, Callable[..., Backbone]] = {"sd3": SD3, "flux": Flux, "sana": Sana}
FAMILIES = {  # diffusers' classes
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "SanaPipeline": "sana",
}


PREFIXES = ("StableDiffusion3", "Flux", "Sana")  # of their relatives, which are not refused


def backbone_class(name: str) -> Callable[..., Backbone]:
    """A family of BACKBONES, or somebody's own by its import path. Raises UserError for neither."""
    if name in BACKBONES:
        return BACKBONES[name]
    try:
        return load_callable(name)
    except LookupError as error:
        raise UserError(
            f"pipeline.backbone is {name!r}, expected {', '.join(BACKBONES)} or module:attribute: "
            f"{error}"
        ) from error


def build_backbone(config: Config, pipeline: Any, *, guidance: float) -> Backbone:
    """Raises UserError for a pipeline of another family, and for a backbone that lacks members."""
    p = config.pipeline
    kind = type(pipeline)
    own = FAMILIES.get(kind.__name__)
    of_diffusers = kind.__module__.startswith("diffusers.")
    if p.backbone in BACKBONES and of_diffusers and not kind.__name__.startswith(PREFIXES):
        raise UserError(
            f"{p.path} is a {kind.__name__}, but flowrl trains pipelines of SD3, FLUX.1 and SANA: "
            "give one of these, or a backbone of your own as pipeline.backbone=module:attribute"
        )
    if p.backbone in BACKBONES and own not in (p.backbone, None):
        raise UserError(
            f"pipeline.backbone is {p.backbone}, but {p.path} is a {type(pipeline).__name__}: "
            f"write pipeline.backbone={own}, or start from a recipe for {own}"
        )
    backbone = backbone_class(p.backbone)(
        pipeline,
        guidance=guidance,
        max_sequence_length=p.max_sequence_length,
        height=p.height,
        width=p.width,
    )
    if lacking := members_lacking(backbone):
        raise UserError(
            f"pipeline.backbone {p.backbone!r} has no {', '.join(lacking)}: "
            "flowrl/backbones/base.py says what a backbone has"
        )
    return backbone


def of_family(config: Config, pipeline: Any) -> Config:
    """The recipe with the backbone that a loaded pipeline asks for, as far as it is known."""
    family = FAMILIES.get(type(pipeline).__name__, config.pipeline.backbone)
    section = config.pipeline.model_copy(update={"backbone": family})
    return config.model_copy(update={"pipeline": section})


def adapted_layers(lora: Lora, backbone: Backbone) -> tuple[str, ...]:
    """Name endings of the adapted layers. Raises UserError for dual attention where is none."""
    targets = tuple(lora.targets or backbone.lora_targets)
    if not lora.dual_attention:
        return targets
    network: Any = backbone.transformer
    return targets + dual_targets(type(network).__name__, network.config)

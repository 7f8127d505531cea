"""The objectives by their kind, and how one of your own is named."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from flowrl.config.sections_forward import Awm, Dgpo, Dpo, Gdro, Kto, Lair, Nft, Rwr, Sft
from flowrl.config.sections_gradient import (
    AlignProp,
    Draft,
    DraftLv,
    FlowbpBridge,
    FlowbpLagrange,
    FlowbpSparse,
    LeapAlign,
    Refl,
    Srpo,
)
from flowrl.config.sections_reverse import Grpo, Spo
from flowrl.utils.fields import Section, Text, option


class CustomObjective(Section):
    """An objective of your own."""

    states: ClassVar[str] = "any"
    kind: Literal["custom"] = option("custom", "An objective of your own.")
    target: Text = option(
        ..., "What makes it, as module:attribute: called with `args`, it returns an objective."
    )
    args: dict[str, Any] = option({}, "Arguments of that call, by name.")


def _grpo_unless_named(value: Any) -> Any:
    # A change such as objective.kl_coef=0.01 alone is meant for the default objective.
    return {"kind": "grpo"} | value if isinstance(value, dict) else value


Objective = Annotated[
    Grpo
    | Spo
    | Nft
    | Dpo
    | Gdro
    | Lair
    | Dgpo
    | Kto
    | Awm
    | Rwr
    | Sft
    | Refl
    | Draft
    | DraftLv
    | AlignProp
    | Srpo
    | LeapAlign
    | FlowbpSparse
    | FlowbpBridge
    | FlowbpLagrange
    | CustomObjective,
    Field(discriminator="kind"),
    BeforeValidator(_grpo_unless_named),
]

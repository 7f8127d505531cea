"""From an objective's options to the objective."""

from typing import Any, cast

from flowrl.build import build_forward as forward
from flowrl.build import build_gradient as gradient
from flowrl.build import build_reverse as reverse
from flowrl.config.objectives import CustomObjective
from flowrl.errors import UserError
from flowrl.functional.sde import StepKernel
from flowrl.objectives.base import Needs, Objective
from flowrl.utils.imports import load_callable

FORWARD = {
    "nft": forward.build_nft,
    "dpo": forward.build_dpo,
    "gdro": forward.build_gdro,
    "sft": forward.build_sft,
    "rwr": forward.build_rwr,
    "awm": forward.build_awm,
    "kto": forward.build_kto,
    "dgpo": forward.build_dgpo,
    "lair": forward.build_lair,
}

GRADIENT = {
    "refl": gradient.build_refl,
    "draft": gradient.build_draft,
    "draft_lv": gradient.build_draft_lv,
    "align_prop": gradient.build_align_prop,
    "srpo": gradient.build_srpo,
    "leap_align": gradient.build_leap_align,
    "flowbp_sparse": gradient.build_flowbp_sparse,
    "flowbp_bridge": gradient.build_flowbp_bridge,
    "flowbp_lagrange": gradient.build_flowbp_lagrange,
}
REVERSE = {"grpo": reverse.build_grpo, "spo": reverse.build_spo}


def build_objective(section: Any, kernel: StepKernel) -> Objective:
    """kernel: the rollout's, which objectives on its steps need."""
    if section.kind == "custom":
        return _custom(section)
    if section.kind in FORWARD:
        return FORWARD[section.kind](section)
    if section.kind in GRADIENT:
        return GRADIENT[section.kind](section)
    return REVERSE[section.kind](section, kernel)


def _custom(section: CustomObjective) -> Objective:
    try:
        make = load_callable(section.target)
    except LookupError as error:
        raise UserError(f"objective.target cannot be loaded: {error.args[0]}") from error
    try:
        found = make(**section.args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"objective.target {section.target} does not accept {section.args}: {error}"
        ) from error
    wrong = [name for name in ("prepare", "loss") if not callable(getattr(found, name, None))]
    if wrong or not isinstance(getattr(found, "needs", None), Needs):
        raise UserError(
            f"{section.target} made a {type(found).__name__}, which is no objective: it needs "
            "`needs` (a flowrl.objectives.base.Needs), `prepare` and `loss`"
        )
    return cast(Objective, found)

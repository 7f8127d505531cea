"""From options to objectives that follow the reward's gradient."""

from flowrl.config.sections_gradient import (
    AlignProp,
    Ascending,
    Draft,
    DraftLv,
    FlowbpBridge,
    FlowbpLagrange,
    FlowbpSparse,
    LeapAlign,
    Refl,
    Srpo,
    UniformTruncation,
)
from flowrl.errors import UserError
from flowrl.objectives.base import Objective
from flowrl.objectives.reward_backprop import draft, flowbp, refl, srpo
from flowrl.objectives.reward_backprop import leap_align as leap
from flowrl.objectives.reward_backprop.base import Ascent


def build_refl(section: Refl) -> Objective:
    return refl.ReFL(ascent=_ascent(section), window=section.window)


def build_draft(section: Draft) -> Objective:
    return draft.DRaFT(ascent=_ascent(section), depth=draft.fixed(section.steps))


def build_draft_lv(section: DraftLv) -> Objective:
    return refl.DRaFTLV(ascent=_ascent(section), copies=section.copies)


def build_align_prop(section: AlignProp) -> Objective:
    how = section.truncation
    if isinstance(how, UniformTruncation):
        depth = draft.uniform()
    else:
        depth = draft.gaussian(how.mean, how.std)
    return draft.DRaFT(ascent=_ascent(section), depth=depth)


def build_srpo(section: Srpo) -> Objective:
    try:
        return srpo.SRPO(
            ascent=_ascent(section),
            positive=section.positive_words,
            negative=section.negative_words,
            denoise_k=section.denoise_k,
            inversion_k=section.inversion_k,
            gap=section.gap,
            lowest=section.lowest,
            highest=section.highest,
            inversion=section.inversion,
            fresh=section.noise == "fresh",
        )
    except ValueError as error:
        raise UserError(f"objective srpo: {error}") from error


def build_leap_align(section: LeapAlign) -> Objective:
    return leap.Leaps(
        ascent=_ascent(section),
        pairs=flowbp.drawn_pairs,
        nested_coef=section.nested_coef,
        distance_floor=section.distance_floor,
    )


def build_flowbp_sparse(section: FlowbpSparse) -> Objective:
    return flowbp.Sparse(
        ascent=_ascent(section),
        steps=section.steps,
        spacing=section.spacing,
        bias=section.bias,
        gain_coef=section.gain_coef,
    )


def build_flowbp_bridge(section: FlowbpBridge) -> Objective:
    return flowbp.Bridge(
        ascent=_ascent(section),
        steps=section.steps,
        bias=section.bias,
        gain_coef=section.gain_coef,
        nested_coef=section.nested_coef,
    )


def build_flowbp_lagrange(section: FlowbpLagrange) -> Objective:
    before, between, after = section.concentration
    pairs = leap.DirichletPairs(before=before, between=between, after=after, latest=section.latest)
    return leap.Leaps(
        ascent=_ascent(section),
        pairs=pairs,
        nested_coef=section.nested_coef,
        distance_floor=section.distance_floor,
        supports=section.supports,
        active=section.active,
        support_coef=section.support_coef,
    )


def _ascent(section: Ascending) -> Ascent:
    return Ascent(hinge=section.hinge, kl_coef=section.kl_coef)

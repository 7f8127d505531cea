"""From an objective's options to the objective."""

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from flowrl.config.objectives import (
    AdvantageOptions,
    AlignPropOptions,
    Anchor,
    AWMOptions,
    ComparedOptions,
    CustomObjectiveOptions,
    DGPOOptions,
    DPOOptions,
    DRaFTLVOptions,
    DRaFTOptions,
    FlowBPBridgeOptions,
    FlowBPLagrangeOptions,
    FlowBPSparseOptions,
    GDROOptions,
    GRPOOptions,
    KTOOptions,
    LAIROptions,
    LeapAlignOptions,
    NFTOptions,
    OldDecayOptions,
    ReFLOptions,
    RewardBackpropOptions,
    RWROptions,
    SFTOptions,
    SPOOptions,
    SRPOOptions,
    Times,
    UniformTruncationOptions,
)
from flowrl.config.objectives import CreditOptions as CreditSection
from flowrl.config.objectives import Keep as KeepSection
from flowrl.config.objectives import NoisingOptions as DrawsSection
from flowrl.errors import UserError
from flowrl.functional.sde import StepKernel
from flowrl.objectives import nft as decay
from flowrl.objectives import noising as timesteps
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm import AWM, LIKELIHOODS
from flowrl.objectives.base import Needs, Objective, OldPolicy
from flowrl.objectives.dpo import DGPO, DPO, KTO, UTILITIES
from flowrl.objectives.gdro import GDRO, LAIR
from flowrl.objectives.grpo import GRPO
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.objectives.nft import NFT
from flowrl.objectives.noising import WEIGHTINGS, Noising, TimeSampler
from flowrl.objectives.reward_backprop import draft, flowbp, refl, srpo
from flowrl.objectives.reward_backprop import leap_align as leap
from flowrl.objectives.reward_backprop.base import RewardBackprop
from flowrl.objectives.sft import WeightedRegression, all_winners, exponential, one_winner
from flowrl.objectives.spo import SPO
from flowrl.objectives.tree_credit import (
    Keep,
    TreeCredit,
    keep_all,
    keep_b2_pairs,
    keep_extreme,
    keep_max_variance,
    keep_parent_top1,
)
from flowrl.utils.imports import load_callable

# --- From options to objectives on the forward process -----------------------------------------

LEAST_SIGMA = 1e-3


def build_nft(section: NFTOptions) -> Objective:
    return NFT(
        draws=_draws(section.draws),
        advantages=_advantages(section.advantage),
        old=OldPolicy(keep=_decay(section.old_decay), samples=True),
        nft_mix=section.nft_mix,
        pred_space=section.pred_space,
        adaptive_weight=section.adaptive_weight,
        r_map=section.r_map,
        kl_coef=section.kl_coef,
    )


def build_dpo(section: DPOOptions) -> Objective:
    return DPO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        sft_coef=section.sft_coef,
    )


def build_gdro(section: GDROOptions) -> Objective:
    return GDRO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        tau=section.tau,
        form=section.form,
        top1_coef=section.top1_coef,
    )


def build_sft(section: SFTOptions) -> Objective:
    weights = {"all": all_winners, "one": one_winner}[section.winners]
    return WeightedRegression(draws=_draws(section.draws), weights=weights)


def build_rwr(section: RWROptions) -> Objective:
    weights = functools.partial(
        exponential, rwr_lambda=section.rwr_lambda, normalise=section.normalise
    )
    return WeightedRegression(draws=_draws(section.draws), weights=weights)


def build_awm(section: AWMOptions) -> Objective:
    return AWM(
        draws=_draws(section.draws),
        advantages=_advantages(section.advantage),
        likelihood=LIKELIHOODS[section.likelihood],
        old=OldPolicy(keep=_decay(section.old_decay)),
        clip=section.clip,
        advantage_max=section.advantage_max,
        kl_coef=section.kl_coef,
        old_kl_coef=section.old_kl_coef,
    )


def build_kto(section: KTOOptions) -> Objective:
    return KTO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        like_above=section.like_above,
        dislike_weight=section.dislike_weight,
        utility=UTILITIES[section.utility],
    )


def build_dgpo(section: DGPOOptions) -> Objective:
    return DGPO(
        errors=_errors(section),
        advantages=_advantages(section.advantage),
        implicit_beta=section.implicit_beta,
        form=section.form,
    )


def build_lair(section: LAIROptions) -> Objective:
    return LAIR(
        errors=_errors(section),
        advantages=_advantages(section.advantage),
        implicit_beta=section.implicit_beta,
        kappa=section.kappa,
    )


def _errors(section: ComparedOptions) -> ImplicitReward:
    return ImplicitReward(
        draws=_draws(section.draws),
        weighting=WEIGHTINGS[section.weighting],
        anchor=_anchor(section.anchor),
        kl_coef=section.kl_coef,
    )


def _anchor(section: Anchor) -> OldPolicy | None:
    if section.kind == "base":
        return None
    return OldPolicy(keep=decay.renewed(section.every), samples=True)


def _decay(section: OldDecayOptions) -> Callable[[int], float]:
    if section.rate is None:
        return decay.stepped(limit=section.limit, start=section.start)
    return decay.ramp(rate=section.rate, limit=section.limit, start=section.start)


def _advantages(section: AdvantageOptions) -> Advantages:
    return Advantages(
        rewards=section.rewards,
        center=section.center,
        scale=section.scale,
        ddof=section.ddof,
        floor=section.floor,
        clip=section.clip,
    )


def _draws(section: DrawsSection) -> Noising:
    return Noising(times=_times(section.times, section.stratified), count=section.count,
                 share=section.share)  # fmt: skip


def _times(section: Times, stratified: bool) -> TimeSampler:
    """From uniform numbers and the rollout's sigmas to those of training."""
    if section.kind == "schedule":
        choose = timesteps.strata_of_schedule if stratified else timesteps.from_schedule
        return lambda u, sigmas: choose(
            u, timesteps.noisiest(sigmas, section.fraction, skip_first=section.skip_first)
        )
    if section.kind == "logit_normal":
        law = functools.partial(timesteps.logit_normal, mean=section.mean, std=section.std)
    else:
        law = functools.partial(timesteps.shifted, shift=section.shift)

    def times(u: Tensor, sigmas: Tensor) -> Tensor:
        # At sigma 0 there is nothing to learn, and weights and targets are infinite.
        return law(timesteps.stratified(u) if stratified else u).clamp(min=LEAST_SIGMA)

    return times


# --- From options to objectives that follow the reward's gradient ------------------------------


def build_refl(section: ReFLOptions) -> Objective:
    return refl.ReFL(ascent=_ascent(section), window=section.window)


def build_draft(section: DRaFTOptions) -> Objective:
    return draft.DRaFT(ascent=_ascent(section), depth=draft.fixed(section.steps))


def build_draft_lv(section: DRaFTLVOptions) -> Objective:
    return refl.DRaFTLV(ascent=_ascent(section), copies=section.copies)


def build_align_prop(section: AlignPropOptions) -> Objective:
    how = section.truncation
    if isinstance(how, UniformTruncationOptions):
        depth = draft.uniform()
    else:
        depth = draft.gaussian(how.mean, how.std)
    return draft.DRaFT(ascent=_ascent(section), depth=depth)


def build_srpo(section: SRPOOptions) -> Objective:
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


def build_leap_align(section: LeapAlignOptions) -> Objective:
    return leap.Leaps(
        ascent=_ascent(section),
        pairs=flowbp.drawn_pairs,
        nested_coef=section.nested_coef,
        distance_floor=section.distance_floor,
    )


def build_flowbp_sparse(section: FlowBPSparseOptions) -> Objective:
    return flowbp.Sparse(
        ascent=_ascent(section),
        steps=section.steps,
        spacing=section.spacing,
        bias=section.bias,
        gain_coef=section.gain_coef,
    )


def build_flowbp_bridge(section: FlowBPBridgeOptions) -> Objective:
    return flowbp.Bridge(
        ascent=_ascent(section),
        steps=section.steps,
        bias=section.bias,
        gain_coef=section.gain_coef,
        nested_coef=section.nested_coef,
    )


def build_flowbp_lagrange(section: FlowBPLagrangeOptions) -> Objective:
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


def _ascent(section: RewardBackpropOptions) -> RewardBackprop:
    return RewardBackprop(hinge=section.hinge, kl_coef=section.kl_coef)


# --- From the options of credit to its object --------------------------------------------------


def build_credit(section: CreditSection) -> TreeCredit:
    return TreeCredit(
        rewards=section.rewards,
        fusion=section.fusion,
        path_coef=section.path_coef,
        edges=section.edges,
        scope=section.scope,
        center=section.center,
        scale=section.scale,
        ddof=section.ddof,
        floor=section.floor,
        clip=section.clip,
        keep=_keep(section.keep),
    )


def _keep(section: KeepSection) -> Keep:
    if section.kind == "parent_top1":
        return keep_parent_top1
    if section.kind == "extreme":
        return functools.partial(keep_extreme, count=section.count)
    if section.kind == "max_variance":
        return functools.partial(keep_max_variance, count=section.count)
    if section.kind == "b2_pairs":
        return functools.partial(keep_b2_pairs, threshold=section.threshold)
    return keep_all


# --- From options to objectives on the reverse process -----------------------------------------


def build_grpo(section: GRPOOptions, kernel: StepKernel) -> GRPO:
    return GRPO(
        kernel=kernel,
        credit=build_credit(section.credit),
        ratio=section.ratio,
        clip_nats=section.clip_nats,
        clip_eps=section.clip_eps,
        step_weight=section.step_weight,
        kl_coef=section.kl_coef,
        kl_form=section.kl_form,
    )


def build_spo(section: SPOOptions, kernel: StepKernel) -> SPO:
    return SPO(
        kernel=kernel,
        logratio_beta=section.logratio_beta,
        clip=section.clip,
        min_gap=section.min_gap,
        tau=section.tau,
        fusion=section.fusion,
        path_coef=section.path_coef,
    )


# --- From an objective's options to the objective ----------------------------------------------

FORWARD = {
    "nft": build_nft,
    "dpo": build_dpo,
    "gdro": build_gdro,
    "sft": build_sft,
    "rwr": build_rwr,
    "awm": build_awm,
    "kto": build_kto,
    "dgpo": build_dgpo,
    "lair": build_lair,
}

GRADIENT = {
    "refl": build_refl,
    "draft": build_draft,
    "draft_lv": build_draft_lv,
    "align_prop": build_align_prop,
    "srpo": build_srpo,
    "leap_align": build_leap_align,
    "flowbp_sparse": build_flowbp_sparse,
    "flowbp_bridge": build_flowbp_bridge,
    "flowbp_lagrange": build_flowbp_lagrange,
}
REVERSE = {"grpo": build_grpo, "spo": build_spo}


def build_objective(section: Any, kernel: StepKernel) -> Objective:
    """kernel: the rollout's, which objectives on its steps need."""
    if section.kind == "custom":
        return _custom(section)
    if section.kind in FORWARD:
        return FORWARD[section.kind](section)
    if section.kind in GRADIENT:
        return GRADIENT[section.kind](section)
    return REVERSE[section.kind](section, kernel)


def _custom(section: CustomObjectiveOptions) -> Objective:
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

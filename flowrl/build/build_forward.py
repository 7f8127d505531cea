"""From options to objectives on the forward process."""

import functools
from collections.abc import Callable

from torch import Tensor

from flowrl.config.sections_forward import (
    Advantage,
    Anchor,
    Awm,
    Compared,
    Dgpo,
    Dpo,
    Gdro,
    Kto,
    Lair,
    Nft,
    OldDecay,
    Rwr,
    Sft,
    Times,
)
from flowrl.config.sections_forward import Draws as DrawsSection
from flowrl.objectives import decay, timesteps
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm import AWM
from flowrl.objectives.awm_maths import LIKELIHOODS
from flowrl.objectives.base import Objective, Old
from flowrl.objectives.dgpo import DGPO
from flowrl.objectives.dpo import DPO
from flowrl.objectives.forward import WEIGHTINGS
from flowrl.objectives.gdro import GDRO
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.kto import KTO
from flowrl.objectives.lair import LAIR
from flowrl.objectives.nft import NFT
from flowrl.objectives.noising import Draws, TimeSampler
from flowrl.objectives.preference import UTILITIES
from flowrl.objectives.sft import WeightedRegression, all_winners, exponential, one_winner

LEAST_SIGMA = 1e-3


def build_nft(section: Nft) -> Objective:
    return NFT(
        draws=_draws(section.draws),
        advantages=_advantages(section.advantage),
        old=Old(keep=_decay(section.old_decay), samples=True),
        nft_mix=section.nft_mix,
        pred_space=section.pred_space,
        adaptive_weight=section.adaptive_weight,
        r_map=section.r_map,
        kl_coef=section.kl_coef,
    )


def build_dpo(section: Dpo) -> Objective:
    return DPO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        sft_coef=section.sft_coef,
    )


def build_gdro(section: Gdro) -> Objective:
    return GDRO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        tau=section.tau,
        form=section.form,
        top1_coef=section.top1_coef,
    )


def build_sft(section: Sft) -> Objective:
    weights = {"all": all_winners, "one": one_winner}[section.winners]
    return WeightedRegression(draws=_draws(section.draws), weights=weights)


def build_rwr(section: Rwr) -> Objective:
    weights = functools.partial(
        exponential, rwr_lambda=section.rwr_lambda, normalise=section.normalise
    )
    return WeightedRegression(draws=_draws(section.draws), weights=weights)


def build_awm(section: Awm) -> Objective:
    return AWM(
        draws=_draws(section.draws),
        advantages=_advantages(section.advantage),
        likelihood=LIKELIHOODS[section.likelihood],
        old=Old(keep=_decay(section.old_decay)),
        clip=section.clip,
        advantage_max=section.advantage_max,
        kl_coef=section.kl_coef,
        old_kl_coef=section.old_kl_coef,
    )


def build_kto(section: Kto) -> Objective:
    return KTO(
        errors=_errors(section),
        implicit_beta=section.implicit_beta,
        like_above=section.like_above,
        dislike_weight=section.dislike_weight,
        utility=UTILITIES[section.utility],
    )


def build_dgpo(section: Dgpo) -> Objective:
    return DGPO(
        errors=_errors(section),
        advantages=_advantages(section.advantage),
        implicit_beta=section.implicit_beta,
        form=section.form,
    )


def build_lair(section: Lair) -> Objective:
    return LAIR(
        errors=_errors(section),
        advantages=_advantages(section.advantage),
        implicit_beta=section.implicit_beta,
        kappa=section.kappa,
    )


def _errors(section: Compared) -> Anchored:
    return Anchored(
        draws=_draws(section.draws),
        weighting=WEIGHTINGS[section.weighting],
        anchor=_anchor(section.anchor),
        kl_coef=section.kl_coef,
    )


def _anchor(section: Anchor) -> Old | None:
    if section.kind == "base":
        return None
    return Old(keep=decay.renewed(section.every), samples=True)


def _decay(section: OldDecay) -> Callable[[int], float]:
    if section.rate is None:
        return decay.stepped(limit=section.limit, start=section.start)
    return decay.ramp(rate=section.rate, limit=section.limit, start=section.start)


def _advantages(section: Advantage) -> Advantages:
    return Advantages(
        rewards=section.rewards,
        center=section.center,
        scale=section.scale,
        ddof=section.ddof,
        floor=section.floor,
        clip=section.clip,
    )


def _draws(section: DrawsSection) -> Draws:
    return Draws(times=_times(section.times, section.stratified), count=section.count,
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

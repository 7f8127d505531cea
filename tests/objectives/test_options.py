from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from flowrl.config import objectives as options
from flowrl.config.validate import check_spo
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs, check_objective
from flowrl.trees.plan import Fan, Step, TreePlan
from flowrl.utils.fields import Options

ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = replace(NOISY, branch=2)
KINDS = [
    kind for kind in get_args(get_args(options.Objective)[0]) if "target" not in kind.model_fields
]

# For every kind values that are not the defaults.
CHANGES = [
    options.GRPOOptions(
        ratio="normalised", clip_nats=None, clip_eps=2e-6, step_weight="equal", kl_coef=0.1,
        kl_form="latent_dt",
    ),
    options.SPOOptions(
        logratio_beta=5.0, clip=0.2, min_gap=0.1, tau=0.5, fusion="path", path_coef=2.0
    ),
    options.NFTOptions(
        nft_mix=0.5, pred_space="velocity", adaptive_weight=False, r_map="binary", kl_coef=0.5
    ),
    options.DPOOptions(implicit_beta=7.0, sft_coef=0.3, weighting="elbo", kl_coef=0.2),
    options.GDROOptions(
        implicit_beta=7.0, tau=0.3, form="top1", top1_coef=0.2, weighting="eps", kl_coef=0.2
    ),
    options.LAIROptions(implicit_beta=7.0, kappa=0.3, weighting="eps", kl_coef=0.2),
    options.DGPOOptions(implicit_beta=7.0, form="linear", weighting="eps", kl_coef=0.2),
    options.KTOOptions(
        implicit_beta=7.0, like_above=0.5, dislike_weight=2.0, utility="risk_seeking",
        weighting="eps", kl_coef=0.2,
    ),
    options.AWMOptions(
        likelihood="t2", clip=0.1, advantage_max=2.0, kl_coef=0.2, old_kl_coef=0.3
    ),
    options.RWROptions(rwr_lambda=0.7, normalise=False),
    options.SFTOptions(winners="one"),
    options.ReFLOptions(window=0.5, hinge=0.5, kl_coef=0.25),
    options.DRaFTOptions(steps=3, hinge=0.5, kl_coef=0.25),
    options.DRaFTLVOptions(copies=5, hinge=0.5, kl_coef=0.25),
    options.AlignPropOptions(hinge=0.5, kl_coef=0.25),
    options.SRPOOptions(
        positive_words="good", negative_words="bad", denoise_k=(0.5, 0.6), inversion_k=(0.7, 0.8),
        gap=0.2, lowest=0.3, highest=0.9, inversion=False, noise="fresh", hinge=0.5, kl_coef=0.25,
    ),
    options.LeapAlignOptions(nested_coef=0.9, distance_floor=0.6, hinge=0.5, kl_coef=0.25),
    options.FlowBPSparseOptions(
        steps=7, bias=3.0, gain_coef=0.1, spacing="even", hinge=0.5, kl_coef=0.25
    ),
    options.FlowBPBridgeOptions(
        steps=7, bias=3.0, gain_coef=0.1, nested_coef=0.9, hinge=0.5, kl_coef=0.25
    ),
    options.FlowBPLagrangeOptions(
        supports=4, active=3, support_coef=0.5, nested_coef=0.9, distance_floor=0.6,
        concentration=(1.0, 2.0, 3.0), latest=0.7, hinge=0.5, kl_coef=0.25,
    ),
]  # fmt: skip


def test_every_option_is_an_attribute_of_what_is_built():
    assert {type(section) for section in CHANGES} == set(KINDS)
    for section in CHANGES:
        made, usual = section.build("cps"), type(section)().build("cps")
        assert made.needs.states == section.states
        for name in set(type(section).model_fields) - {"kind"}:
            value = getattr(section, name)
            if isinstance(value, Options):
                assert hasattr(made, name), name
            else:
                assert getattr(made, name) == value != getattr(usual, name), name
        if section.states == "transitions":
            assert made.kernel is KERNELS["cps"]


def test_nested_options_are_built():
    times = options.ScheduleTimesOptions(fraction=0.5, skip_first=True)
    nft = options.NFTOptions(
        noising=options.NoisingOptions(count=3, share="image", stratified=True, times=times),
        advantage=options.AdvantageOptions(center="median", scale="mad", clip=2.0),
        old_decay=options.OldDecayOptions(start=2, rate=0.1, limit=0.25),
    ).build()
    assert (nft.noising.count, nft.noising.share, nft.noising.stratified) == (3, "image", True)
    assert (nft.noising.times.fraction, nft.noising.times.skip_first) == (0.5, True)
    assert (nft.advantage.center, nft.advantage.scale, nft.advantage.clip) == ("median", "mad", 2.0)
    old = nft.needs.old
    assert old.samples and [old.decay(i) for i in (0, 2, 3, 9)] == [0, 0, 0.1, 0.25]
    moving = options.DPOOptions(anchor=options.MovingAnchorOptions(every=2)).build()
    assert moving.needs.old.samples and [moving.anchor.decay(i) for i in range(3)] == [0, 1, 0]
    credit = options.CreditOptions(keep=options.ExtremeOptions(count=3), edges="path")
    grpo = options.GRPOOptions(credit=credit).build("flow_sde")
    assert grpo.credit.edges == "path" and grpo.credit.keep.keywords == {"count": 3}


def test_depths_are_those_of_the_options():
    u = torch.rand(500, generator=torch.Generator().manual_seed(0))
    assert options.DRaFTOptions(steps=3).build().truncate(u, 50).unique().tolist() == [3]
    narrow = options.GaussianTruncationOptions(mean=0.5, std=0.02)
    found = options.AlignPropOptions(truncation=narrow).build().truncate(u, 50).double()
    assert found.mean().item() == pytest.approx(25, abs=0.3)
    spread = options.AlignPropOptions(truncation=options.UniformTruncationOptions()).build()
    assert spread.truncate(u, 50).unique().tolist() == list(range(1, 51))


def test_options_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="gap 0.5, lowest 0.1 and highest 0.99 must be in order"):
        options.SRPOOptions(gap=0.5).build()
    with pytest.raises(UserError, match="both positive and negative words"):
        options.SRPOOptions(positive_words="good").build()
    with pytest.raises(ValidationError):
        options.FlowBPBridgeOptions(steps=1)


def test_trees_without_trained_siblings_are_refused():
    untrained = replace(TWICE, train=False)
    for plan in (
        TreePlan(4, (NOISY, NOISY, ODE)),
        TreePlan(2, (untrained, NOISY, ODE)),
        TreePlan(2, (ODE,) * 3, fans=(Fan(step=0, width=1),)),
    ):
        with pytest.raises(ValueError, match="more than one child"):
            check_spo(plan)
    check_spo(TreePlan(1, (TWICE, NOISY, ODE)))
    check_spo(TreePlan(2, (ODE,) * 3, fans=(Fan(step=1, width=2),)))


class OldSignature:
    needs = Needs(states="endpoints")

    def prepare(self, rollout): ...

    def loss(self, policy, batch, *, reference, old, generator): ...


def test_an_objective_of_the_old_signature_is_refused_by_the_new_one():
    with pytest.raises(UserError, match=r"mine:Old takes .* loss\(self, models, batch\)"):
        check_objective(OldSignature(), "mine:Old")
    with pytest.raises(UserError, match="is no objective"):
        check_objective(object(), "mine:Old")

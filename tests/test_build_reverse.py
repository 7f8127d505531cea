"""Options of objectives on the reverse process reach what is built from them."""

from dataclasses import replace

import pytest

from flowrl.build.objective import build_grpo, build_spo
from flowrl.config.objectives import GRPOOptions, SPOOptions, check_spo
from flowrl.functional.sde import KERNELS
from flowrl.trees.plan import Fan, Step, TreePlan

KERNEL = KERNELS["cps"]
CHANGED = {
    build_grpo: GRPOOptions(
        ratio="normalised",
        clip_nats=None,
        clip_eps=2e-6,
        step_weight="equal",
        kl_coef=0.1,
        kl_form="latent_dt",
    ),
    build_spo: SPOOptions(
        logratio_beta=5.0, clip=0.2, min_gap=0.1, tau=0.5, fusion="path", path_coef=2.0
    ),
}
ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = replace(NOISY, branch=2)


@pytest.mark.parametrize("build", CHANGED)
def test_every_option_is_an_attribute_of_what_is_built(build):
    section = CHANGED[build]
    made, usual = build(section, KERNEL), build(type(section)(), KERNEL)
    assert made.kernel is KERNEL
    for name in set(type(section).model_fields) - {"kind", "credit"}:
        assert getattr(made, name) == getattr(section, name) != getattr(usual, name), name


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

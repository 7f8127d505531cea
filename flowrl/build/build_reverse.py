"""From options to objectives on the reverse process."""

from flowrl.build.build_credit import build_credit
from flowrl.config.sections_reverse import Grpo, Spo
from flowrl.functional.sde import StepKernel
from flowrl.objectives.grpo import GRPO
from flowrl.objectives.spo import SPO


def build_grpo(section: Grpo, kernel: StepKernel) -> GRPO:
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


def build_spo(section: Spo, kernel: StepKernel) -> SPO:
    return SPO(
        kernel=kernel,
        logratio_beta=section.logratio_beta,
        clip=section.clip,
        min_gap=section.min_gap,
        tau=section.tau,
        fusion=section.fusion,
        path_coef=section.path_coef,
    )

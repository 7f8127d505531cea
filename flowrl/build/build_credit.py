"""From the options of credit to its object."""

import functools

from flowrl.config.sections_credit import Credit as CreditSection
from flowrl.config.sections_credit import Keep as KeepSection
from flowrl.objectives.tree_credit import (
    Credit,
    Keep,
    keep_all,
    keep_b2_pairs,
    keep_extreme,
    keep_max_variance,
    keep_parent_top1,
)


def build_credit(section: CreditSection) -> Credit:
    return Credit(
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

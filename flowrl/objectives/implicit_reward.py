"""Errors of the policy against those of an anchor: what every implicit reward is made of."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.base import Needs, OldPolicy
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import NoisedImages, Noising
from flowrl.reference_cache import ReferenceErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """error, anchor: (N,), weighted and averaged over the draws; error has the policy's graph.

    penalty: (), squared distance from the base's velocities, 0 unless it is asked for.
    """

    error: Tensor
    anchor: Tensor
    penalty: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitReward:
    """Policy and anchor at the same points. See the options of the same names.

    weighting: sigma -> weight. anchor: an old policy to compare with, None for the base.
    kl_coef: weight of the penalty, which the objective adds to its loss.
    """

    draws: Noising
    weighting: Callable[[Tensor], Tensor]
    anchor: OldPolicy | None = None
    kl_coef: float = 0.0

    def needs(self, *, complete_groups: bool = False, whole_update: bool = False) -> Needs:
        return Needs(
            states="endpoints",
            reference=self.anchor is None or self.kl_coef > 0,
            old=self.anchor,
            complete_groups=complete_groups,
            whole_update=whole_update,
        )

    def __call__(
        self, policy: VelocityField, batch: Endpoints, reference: VelocityField, old: VelocityField
    ) -> Gap:
        """Raises ValueError for a store's kept errors where velocities are needed."""
        points = self.draws(batch)
        v = points.velocity(policy)
        penalty = torch.zeros((), device=v.device)
        if batch.known is not None:
            if self.anchor is not None or self.kl_coef > 0:
                raise ValueError("kept errors of the base serve neither another anchor nor a pull")
            anchor = _known(batch, batch.known, points, reference)
        else:
            with torch.no_grad():
                v_anchor = points.velocity(reference if self.anchor is None else old)
            anchor = points.error(v_anchor)
            if self.kl_coef > 0 and self.anchor is None:
                penalty = velocity_kl(v, v_anchor).mean()
            elif self.kl_coef > 0:
                penalty = points.distance(v, reference)
        weight = points.by_image(self.weighting(points.sigma))
        error = (weight * points.error(v)).mean(1)
        return Gap(error=error, anchor=(weight * anchor).mean(1), penalty=penalty)


@torch.no_grad()
def _known(
    batch: Endpoints, known: ReferenceErrors, points: NoisedImages, reference: VelocityField
) -> Tensor:
    """(N, D) errors of the reference, computed and kept where they are not known yet."""
    errors = known.get(batch.image, points.place)
    missing = errors.isnan().any(1).nonzero().squeeze(1)
    if len(missing):
        new = points.take(missing)
        errors[missing] = new.error(new.velocity(reference))
        known.put(batch.image[missing], new.place, errors[missing])
    return errors

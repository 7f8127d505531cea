"""Errors of the policy against those of an anchor: the implicit reward of DPO and its relatives."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Compared, Endpoints
from flowrl.objectives.noising import WEIGHTINGS, NoisedImages, Noising
from flowrl.trajectory import ReferenceErrors, Rollout


def implicit_reward(err: Tensor, err_ref: Tensor, implicit_beta: float | Tensor) -> Tensor:
    """Return s = -implicit_beta (err - err_ref), the reward that the policy implies. (N,)"""
    return -implicit_beta * (err - err_ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Velocity errors of N images, weighted and averaged over their noise levels."""

    policy: Tensor  # (N,), with graph
    anchor: Tensor  # (N,)
    penalty: Tensor  # (), distance from the base's velocities; 0 without kl_coef

    @property
    def delta(self) -> Tensor:
        """The policy's errors less the anchor's. (N,)"""
        return self.policy - self.anchor


@dataclass(frozen=True, kw_only=True)
class ImplicitReward:
    """Base of objectives that compare policy and anchor on the same noised images.

    The fields are the options of the same names. anchor: an old policy; None is the base model.
    """

    implicit_beta: float
    noising: Noising
    weighting: str = "uniform"
    anchor: OldPolicy | None = None
    kl_coef: float = 0.0

    compared: ClassVar[Compared] = "image"  # which images the loss must see together

    @property
    def needs(self) -> Needs:
        return Needs(
            states="endpoints",
            reference=self.anchor is None or self.kl_coef > 0,
            old=self.anchor,
            complete_groups=self.compared == "group",
            update_mean=self.compared == "update",
        )

    def endpoints(self, rollout: Rollout, signal: Tensor, keep: Tensor) -> Endpoints:
        return Endpoints.from_rollout(
            rollout, signal, keep, forwards=self.noising.count, compared=self.compared
        )

    def errors(self, models: Models, batch: Endpoints) -> Errors:
        """Compute the errors of policy and anchor.

        Raises ValueError for cached errors of the base where velocities are needed.
        """
        points = self.noising(batch)
        v = points.velocity(models.policy)
        penalty = torch.zeros((), device=v.device)
        if batch.known is not None:
            if self.anchor is not None or self.kl_coef > 0:
                raise ValueError("cached errors of the base serve no other anchor and no kl_coef")
            anchor = _cached_errors(batch, batch.known, points, models)
        else:
            with torch.no_grad():
                v_anchor = points.velocity(models.reference if self.anchor is None else models.old)
            anchor = points.error(v_anchor)
            if self.kl_coef > 0 and self.anchor is None:
                penalty = velocity_kl(v, v_anchor).mean()
            elif self.kl_coef > 0:
                penalty = points.distance(v, models.reference)
        weight = points.by_image(WEIGHTINGS[self.weighting](points.sigma))
        error = (weight * points.error(v)).mean(1)
        return Errors(policy=error, anchor=(weight * anchor).mean(1), penalty=penalty)


@torch.no_grad()
def _cached_errors(
    batch: Endpoints, known: ReferenceErrors, points: NoisedImages, models: Models
) -> Tensor:
    """Return the reference's errors (N, D); compute and cache those that are missing."""
    errors = known.get(batch.image, points.place)
    missing = errors.isnan().any(1).nonzero().squeeze(1)
    if len(missing):
        new = points.take(missing)
        errors[missing] = new.error(new.velocity(models.reference))
        known.put(batch.image[missing], new.place, errors[missing])
    return errors

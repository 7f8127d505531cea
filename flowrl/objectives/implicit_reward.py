"""Errors of the policy against those of an anchor: the implicit reward of DPO and its relatives."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.config.objectives import ComparedOptions
from flowrl.functional.sde import squared_distance
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Compared, Endpoints
from flowrl.objectives.noising import noise_images
from flowrl.trajectory import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Velocity errors of N images, averaged over their noise levels."""

    policy: Tensor  # (N,), with graph
    anchor: Tensor  # (N,)
    penalty: Tensor  # (), distance from the base's velocities; 0 without kl_coef

    @property
    def delta(self) -> Tensor:
        """The policy's errors less the anchor's. (N,)"""
        return self.policy - self.anchor


@dataclass(frozen=True)
class ImplicitReward:
    """Base of objectives that compare the policy with an anchor on the same noised images.

    The anchor is the base model, or an old policy where `options.anchor_every` is set.
    """

    options: ComparedOptions
    compared: ClassVar[Compared] = "image"  # which images the loss must see together

    @property
    def needs(self) -> Needs:
        every, old = self.options.anchor_every, None
        if every is not None:  # replaced in every `every`-th iteration, and the same in between
            old = OldPolicy(decay=lambda iteration: float(iteration % every > 0), samples=True)
        return Needs(
            states="endpoints",
            reference=old is None or self.options.kl_coef > 0,
            old=old,
            complete_groups=self.compared == "group",
            update_mean=self.compared == "update",
        )

    def endpoints(self, rollout: Rollout, signal: Tensor, keep: Tensor) -> Endpoints:
        return Endpoints.from_rollout(
            rollout, signal, keep, forwards=self.options.noising.count, compared=self.compared,
            pull_on=self.options.kl_on,
        )  # fmt: skip

    def errors(self, models: Models, batch: Endpoints) -> Errors:
        """Return the errors of policy and anchor."""
        points = noise_images(batch, self.options.noising)
        v = points.velocity(models.policy)
        penalty = torch.zeros((), device=v.device)
        moving = self.options.anchor_every is not None
        with torch.no_grad():
            v_anchor = points.velocity(models.old if moving else models.reference)
        if self.options.kl_coef > 0:
            kl = points.distance(v, models.reference) if moving else squared_distance(v, v_anchor)
            penalty = (points.pull * kl).mean()
        policy, anchor = (points.error(field).mean(1) for field in (v, v_anchor))
        return Errors(policy=policy, anchor=anchor, penalty=penalty)

"""DiffusionNFT (2509.16117): towards good pictures, and away from bad ones, of an old policy."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.base import Needs, Old
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.forward import velocity_error
from flowrl.objectives.nft_maths import nft_loss, reward_to_unit
from flowrl.objectives.noising import Draws
from flowrl.trajectory import Metrics, Rollout


class NFT:
    """See the options of the same names. `old` also draws the pictures: the identities of the
    paper hold for pictures of the velocity that both branches mix in."""

    def __init__(
        self,
        *,
        draws: Draws,
        advantages: Advantages,
        old: Old,
        nft_mix: float,
        pred_space: Literal["x0", "velocity"] = "x0",
        adaptive_weight: bool = True,
        r_map: str = "all",
        kl_coef: float = 0.0,
    ):
        self.draws, self.advantages, self.nft_mix = draws, advantages, nft_mix
        self.pred_space: Literal["x0", "velocity"] = pred_space
        self.adaptive_weight, self.r_map, self.kl_coef = adaptive_weight, r_map, kl_coef
        self.needs = Needs(states="endpoints", reference=kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Every picture that is compared; the signal is r in [0, 1], 1/2 for what teaches nothing.

        At r = 1/2 the loss still draws the policy to the old one.
        """
        advantage, valid = self.advantages(rollout)
        return endpoints(
            rollout, reward_to_unit(advantage, self.advantages.clip, self.r_map), valid,
            draws=self.draws.count, compared="image",
        )  # fmt: skip

    def loss(
        self,
        policy: VelocityField,
        batch: Endpoints,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        points = self.draws(batch)
        v = points.velocity(policy)
        with torch.no_grad():
            v_old = points.velocity(old)
        loss = nft_loss(
            v, v_old, points.x, points.x0, points.sigma,
            batch.signal.repeat_interleave(points.draws), self.nft_mix, self.advantages.clip,
            pred_space=self.pred_space, adaptive_weight=self.adaptive_weight,
        ).mean()  # fmt: skip
        metrics: Metrics = {
            "policy/error": velocity_error(v.detach(), points.target).mean(),
            "policy/moved": velocity_kl(v.detach(), v_old).mean(),
        }
        if self.kl_coef > 0:
            kl = points.distance(v, reference)
            loss, metrics["policy/kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics

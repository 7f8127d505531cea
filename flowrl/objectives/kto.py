"""Diffusion-KTO (2404.04465): pictures that are liked or not, without pairs."""

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.preference import Utility, kto_loss, sigmoid_utility
from flowrl.trajectory import Metrics, Rollout


class KTO:
    """like_above: a picture with a higher reward is liked; None is the mean of its prompt.
    dislike_weight: of the others, against 1."""

    def __init__(
        self,
        *,
        errors: Anchored,
        implicit_beta: float,
        like_above: float | None = None,
        dislike_weight: float = 1.0,
        utility: Utility = sigmoid_utility,
    ):
        self.errors, self.implicit_beta = errors, implicit_beta
        self.like_above, self.utility = like_above, utility
        self.dislike_weight = dislike_weight
        self.needs = errors.needs(whole_update=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Signal 1 for what is liked, -1 for the rest.

        Without a threshold tied prompts have neither, and are dropped, and so are pictures at the
        mean. All of an update is seen together, since the reference point is its mean.
        """
        if self.like_above is None:
            away, keep = Advantages()(rollout)
            keep = keep & (away != 0)
        else:
            away, keep = rollout.reward.cpu() - self.like_above, rollout.valid.cpu()
        liked = torch.where(away > 0, 1.0, -1.0)
        return endpoints(rollout, liked, keep, draws=self.errors.draws.count, compared="update")

    def loss(
        self,
        policy: VelocityField,
        batch: Endpoints,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        gap = self.errors(policy, batch, reference, old)
        utility = kto_loss(
            gap.error,
            gap.anchor,
            batch.signal,
            self.implicit_beta,
            weight=torch.where(batch.signal > 0, 1.0, self.dislike_weight),
            utility=self.utility,
        )
        loss = utility.mean() + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/liked": (batch.signal > 0).float().mean(),
        }

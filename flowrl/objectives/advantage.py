"""What each picture of a rollout is worth, and how much better it is than others of its prompt."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.groups import lone
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.objectives.advantage_maths import clip_advantage
from flowrl.objectives.normalise import Centre, Population, Scale, normalise
from flowrl.scoring.composite import combine_gdpo
from flowrl.trajectory import Rollout


def worth(rollout: Rollout, rewards: str) -> tuple[Tensor, Tensor]:
    """(G,) what each picture is worth, and whether that is known.

    rewards: "sum", the weighted sum, or "gdpo", GDPO's sum of each reward's z-scores, which is
    known as soon as one of them is.
    """
    if rewards == "sum":
        return rollout.reward.cpu(), rollout.valid.cpu()
    combined = combine_gdpo(rollout.terms, rollout.weights, rollout.group, rollout.applicable)
    return combined, ~combined.isnan()


def scale_of(rewards: str, scale: Scale | Literal["auto"]) -> Scale:
    """What divides: "auto" is the last step of GDPO for its z-scores, else the group's std."""
    if scale != "auto":
        return scale
    return "global" if rewards == "gdpo" else "std"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Normalise the worth of the pictures of each prompt; see the options `advantage`."""

    rewards: str = "sum"
    center: Centre = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(G,) fp32, 0 where there is nothing to compare with; and which pictures are compared:
        those whose worth is known, of prompts with at least two such pictures."""
        value, valid = worth(rollout, self.rewards)
        group = rollout.group.cpu()
        whole = torch.ones(1, dtype=torch.bool)
        among = Population(key=group[:, None], counted=whole, leaf=whole)
        advantage = normalise(
            value.masked_fill(~valid, torch.nan)[:, None],
            among,
            centre=self.center,
            scale=scale_of(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )
        compared = valid & ~lone(valid, group)
        return clip_advantage(advantage.squeeze(1), self.clip).float(), compared


def lots(rollout: Rollout) -> Tensor:
    """(G,) in [0, 1): a number for each picture by which ties are broken, anew in each rollout."""
    seeds = [
        noise_seed(seed=rollout.seed, iteration=0, prompt="", root=image, step=0, role="lot")
        for image in range(len(rollout.reward))
    ]
    return keyed_uniform(seeds, (1,)).squeeze(1)

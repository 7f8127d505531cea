"""Rollouts of bare images, as a store gives them, and objectives that learn from them."""

import torch
from toy_policy import D, Toy, cond, no_network
from toy_rollout import rollout_of

from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm import AWM
from flowrl.objectives.base import Models
from flowrl.objectives.dpo import DGPO, DPO, KTO
from flowrl.objectives.gdro import GDRO, LAIR
from flowrl.objectives.nft import NFT, old_decay
from flowrl.objectives.noising import Noising, UniformTimes
from flowrl.objectives.sft import RWR, SFT
from flowrl.offline.source import single_node_trees
from flowrl.trajectory import Rollout

SIGMAS = torch.linspace(1, 0, 9)
REWARD = (0.1, 0.5, 0.9, 0.3, 0.2, 0.7, 0.8, 0.25)  # of two prompts, four images each


def images(reward=REWARD, group=None, seed: int = 5) -> Rollout:
    rewards = torch.tensor(reward)
    if group is None:
        group = torch.arange(2).repeat_interleave(len(rewards) // 2)
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randn(len(rewards), D, generator=generator).double()
    return rollout_of(single_node_trees(x0, group, SIGMAS), rewards, cond(), seed=seed)


def noising(count: int = 2, share="group") -> Noising:
    return Noising(times=UniformTimes(), count=count, share=share)


def compared(weighting: str = "uniform", count: int = 2, **options) -> dict:
    return {"noising": noising(count), "weighting": weighting, "implicit_beta": 3.0} | options


SNAPSHOT = old_decay(rate=None, limit=0.0)
OBJECTIVES = {
    "dpo": lambda: DPO(**compared(), sft_coef=0.1),
    "gdro": lambda: GDRO(**compared("eps"), tau=0.2),
    "gdro, top-1": lambda: GDRO(**compared(), tau=0.2, form="top1"),
    "lair": lambda: LAIR(**compared(), advantage=Advantages(), kappa=0.5),
    "dgpo": lambda: DGPO(**compared(kl_coef=0.1), advantage=Advantages()),
    "gdpo_sr": lambda: DGPO(**compared(), advantage=Advantages(), form="linear"),
    "kto": lambda: KTO(**compared()),
    "sft": lambda: SFT(noising=noising()),
    "best of n": lambda: SFT(noising=noising(), winners="one"),
    "rwr": lambda: RWR(noising=noising(share="image"), rwr_lambda=0.5),
    "awm": lambda: AWM(
        noising=noising(share="image"), advantage=Advantages(), old_decay=SNAPSHOT, clip=0.5,
        kl_coef=0.1, old_kl_coef=0.1,
    ),
    "nft": lambda: NFT(
        noising=noising(share="image"), advantage=Advantages(), old_decay=SNAPSHOT, nft_mix=0.5,
        kl_coef=0.1,
    ),
}  # fmt: skip


def moved(toy: Toy, by: float = 0.05) -> Toy:
    other = Toy()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, q in zip(other.parameters(), toy.parameters(), strict=True):
            p.copy_(q + by * torch.randn(p.shape, generator=generator))
    return other


def loss_of(objective, toy, batch, reference=None, old=None):
    needs = objective.needs
    models = Models(
        policy=toy,
        reference=(reference or moved(toy)) if needs.reference else no_network,
        old=(old or moved(toy, 0.02)) if needs.old is not None else no_network,
    )
    loss, metrics = objective.loss(models, batch)
    assert not any(m.requires_grad for m in metrics.values())
    return loss, metrics

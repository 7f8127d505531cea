"""Rollouts of bare images, as a store gives them, and objectives that learn from them."""

import torch
import toy_chains
from toy_chains import no_network
from toy_policy import D, Toy, cond
from toy_rollout import rollout_of

from flowrl.config import objectives as options
from flowrl.offline.source import single_node_trees
from flowrl.trajectory import Rollout

SIGMAS = torch.linspace(1, 0, 9)
REWARD = (0.1, 0.5, 0.9, 0.3, 0.2, 0.7, 0.8, 0.25)  # of two prompts, four images each
SHARED = options.NoisingOptions(count=2)
PER_IMAGE = options.NoisingOptions(count=2, share="image")
COMPARED = {"noising": SHARED, "implicit_beta": 3.0}
OBJECTIVES = {
    "dpo": options.DPOOptions(**COMPARED, kl_coef=0.1),
    "gdro": options.GDROOptions(**COMPARED, tau=0.2),
    "gdro, top-1": options.GDROOptions(**COMPARED, tau=0.2, form="top1"),
    "lair": options.LAIROptions(**COMPARED),
    "dgpo": options.DGPOOptions(**COMPARED, kl_coef=0.1),
    "kto": options.KTOOptions(**COMPARED),
    "sft": options.SFTOptions(noising=SHARED),
    "rwr": options.RWROptions(noising=PER_IMAGE, tau=0.5),
    "awm": options.AWMOptions(noising=PER_IMAGE, clip=0.5, kl_coef=0.1),
    "nft": options.NFTOptions(noising=PER_IMAGE, nft_mix=0.5, kl_coef=0.1),
}


def make(name: str, **changes):
    return OBJECTIVES[name].model_copy(update=changes).build()


def images(reward=REWARD, group=None, seed: int = 5) -> Rollout:
    rewards = torch.tensor(reward)
    if group is None:
        group = torch.arange(2).repeat_interleave(len(rewards) // 2)
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randn(len(rewards), D, generator=generator).double()
    return rollout_of(single_node_trees(x0, group, SIGMAS), rewards, cond(), seed=seed)


def moved(toy: Toy, by: float = 0.05) -> Toy:
    other = Toy()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, q in zip(other.parameters(), toy.parameters(), strict=True):
            p.copy_(q + by * torch.randn(p.shape, generator=generator))
    return other


def loss_of(objective, toy, batch, reference=None, old=None):
    needs = objective.needs
    reference = (reference or moved(toy)) if needs.reference else no_network
    old = (old or moved(toy, 0.02)) if needs.old is not None else no_network
    return toy_chains.loss_of(objective, toy, batch, reference, old=old)


def at_the_reference(objective, rollout=None):
    """Loss, metrics and gradient where policy, reference and old policy are equal."""
    toy, batch = Toy(), objective.prepare(rollout or images())
    loss, metrics = loss_of(objective, toy, batch, moved(toy, 0.0), moved(toy, 0.0))
    return loss.item(), metrics, toy_chains.gradient(loss, toy)

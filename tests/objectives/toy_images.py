"""Rollouts of bare images, as a store gives them, and objectives that learn from them."""

import functools

import torch
from toy_policy import D, Toy, cond, no_network

from flowrl.objectives import noising as timesteps
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm import AWM, LIKELIHOODS
from flowrl.objectives.base import OldPolicy
from flowrl.objectives.dpo import DGPO, DPO, KTO
from flowrl.objectives.gdro import GDRO, LAIR
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.objectives.nft import NFT, stepped
from flowrl.objectives.noising import WEIGHTINGS, Noising
from flowrl.objectives.sft import WeightedRegression, all_winners, exponential, one_winner
from flowrl.offline.source import single_node_trees
from flowrl.trajectory import Rollout

SIGMAS = torch.linspace(1, 0, 9)
REWARD = (0.1, 0.5, 0.9, 0.3, 0.2, 0.7, 0.8, 0.25)  # of two prompts, four images each


def images(reward=REWARD, group=None, seed: int = 5) -> Rollout:
    """Images of two prompts, by default as many of each, those of one side by side."""
    worth = torch.tensor(reward)
    if group is None:
        group = torch.arange(2).repeat_interleave(len(worth) // 2)
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randn(len(worth), D, generator=generator).double()
    return Rollout(
        tree=single_node_trees(x0, group, SIGMAS),
        cond=cond(),
        prompts=("a", "b"),
        metadata=({}, {}),
        images=torch.zeros(0, 3, 1, 1),
        trees=torch.arange(len(worth)),
        scores=worth[:, None],
        applicable=torch.ones(len(worth), 1, dtype=torch.bool),
        terms=worth[:, None],
        names=("r",),
        weights=torch.ones(1),
        reward=worth,
        valid=worth.isfinite(),
        group=group,
        log_prob=torch.zeros(len(worth), 1),
        seed=seed,
    )


def draws(count: int = 2, share="group") -> Noising:
    return Noising(times=lambda u, sigmas: timesteps.uniform(u), count=count, share=share)


def anchored(weighting: str = "uniform", count: int = 2, **options) -> ImplicitReward:
    return ImplicitReward(draws=draws(count), weighting=WEIGHTINGS[weighting], **options)


SNAPSHOT = OldPolicy(keep=stepped(limit=0.0))
OBJECTIVES = {
    "dpo": lambda: DPO(errors=anchored(), implicit_beta=3.0, sft_coef=0.1),
    "gdro": lambda: GDRO(errors=anchored("eps"), implicit_beta=3.0, tau=0.2),
    "gdro, top-1": lambda: GDRO(errors=anchored(), implicit_beta=3.0, tau=0.2, form="top1"),
    "lair": lambda: LAIR(
        errors=anchored(), advantages=Advantages(), implicit_beta=3.0, kappa=0.5
    ),
    "dgpo": lambda: DGPO(
        errors=anchored(kl_coef=0.1), advantages=Advantages(), implicit_beta=3.0
    ),
    "gdpo_sr": lambda: DGPO(
        errors=anchored(), advantages=Advantages(), implicit_beta=3.0, form="linear"
    ),
    "kto": lambda: KTO(errors=anchored(), implicit_beta=3.0),
    "sft": lambda: WeightedRegression(draws=draws(), weights=all_winners),
    "best of n": lambda: WeightedRegression(draws=draws(), weights=one_winner),
    "rwr": lambda: WeightedRegression(
        draws=draws(share="image"),
        weights=functools.partial(exponential, rwr_lambda=0.5, normalise=True),
    ),
    "awm": lambda: AWM(
        draws=draws(share="image"), advantages=Advantages(), old=SNAPSHOT, clip=0.5,
        likelihood=LIKELIHOODS["ghuber"], kl_coef=0.1, old_kl_coef=0.1,
    ),
    "nft": lambda: NFT(
        draws=draws(share="image"), advantages=Advantages(), old=SNAPSHOT, nft_mix=0.5,
        kl_coef=0.1,
    ),
}  # fmt: skip


def moved(toy: Toy, by: float = 0.05) -> Toy:
    """A copy at another place."""
    other = Toy()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, q in zip(other.parameters(), toy.parameters(), strict=True):
            p.copy_(q + by * torch.randn(p.shape, generator=generator))
    return other


def loss_of(objective, toy, batch, reference=None, old=None):
    """Of `toy`, against networks that are called only if that was declared."""
    needs = objective.needs
    loss, metrics = objective.loss(
        toy,
        batch,
        reference=(reference or moved(toy)) if needs.reference else no_network,
        old=(old or moved(toy, 0.02)) if needs.old is not None else no_network,
        generator=torch.Generator(),
    )
    assert not any(m.requires_grad for m in metrics.values())
    return loss, metrics

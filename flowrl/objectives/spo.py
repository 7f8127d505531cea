"""SPO (2406.04314), step-aware preferences: of the children of one latent, best against worst."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowrl.config.objectives import SPOOptions
from flowrl.functional.gaussian import log_ratio
from flowrl.functional.groups import best_and_worst
from flowrl.functional.sde import StepKernel
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.tree_credit import node_values
from flowrl.trajectory import Metrics, Rollout, Transitions, transitions

BETA, CLIP = 10.0, 0.1  # the published scale of the log-ratio, and bound of the ratio
MIN_GAP = 0.3  # smallest preference of a best child over the worst, as published


def spo_loss(log_ratio_w: Tensor, log_ratio_l: Tensor) -> Tensor:
    """Return -log sigmoid(BETA (log clip(rho_w, 1 +- CLIP) - log clip(rho_l, 1 +- CLIP))). (P,)

    log_ratio_w, log_ratio_l: (P,) log rho of winner and loser, policy over reference, averaged over
    the latent. A clipped ratio has no gradient in either direction: unlike PPO's clip, this one
    cannot pull it back into its range.
    """
    # Bounds on the logarithm, not on the ratio: near 1 fp32 would round most of it away.
    low, high = math.log1p(-CLIP), math.log1p(CLIP)
    margin = log_ratio_w.clamp(low, high) - log_ratio_l.clamp(low, high)
    return softplus(-BETA * margin)


def softmax_gap(best: Tensor, worst: Tensor, tau: float) -> Tensor:
    """Return the difference of softmax([best, worst] / tau). (P,) in [0, 1)

    The softmax is over these two alone. With logits r it is P(best is preferred) - P(worst is) of
    Bradley and Terry, and it equals tanh((best - worst) / (2 tau)).
    """
    return ((best - worst) / (2 * tau)).tanh()


@dataclass(frozen=True)
class SPO:
    """Prefer, at every split, the child that leads to better images.

    The published method asks a preference model that reads noisy latents, and walks on from a
    random child; here a child's value is that of the images below it, all of which are sampled.
    `needs.ratio` is False because the ratio is to the reference, not to the policy that sampled
    the pair: the loss stays correct when the rollout used another numerical precision.
    """

    options: SPOOptions
    kernel: StepKernel  # the rollout's

    @property
    def needs(self) -> Needs:
        return Needs(states="transitions", reference=True)

    def prepare(self, rollout: Rollout) -> Transitions:
        """Return the edges of all pairs, two by two: advantage 1 for the winner, -1 for the loser.

        Candidates are the trained children of one parent by one move, whose laws are alike: fans of
        several lengths are not mixed. Children without a reward below are no candidates, and where
        the others tie or differ too little there is no pair.
        """
        tree, edge = rollout.tree, rollout.tree.edge
        value = self.values(rollout)[rollout.trees.cpu()][:, edge].flatten()
        valued = (~value.isnan()).nonzero().squeeze(1)
        # A number for the children of one parent by one move, tree by tree.
        moves = torch.stack((tree.parent[edge], tree.move[edge]))
        _, family = moves.unique(dim=1, return_inverse=True)
        width = int(family.max()) + 1 if len(family) else 1
        siblings = (torch.arange(len(tree))[:, None] * width + family).flatten()
        # Of equal children the first: their noises are alike in law.
        pairs = best_and_worst(value[valued], siblings[valued], -valued.double())
        winner, loser = (valued[rows] for rows in pairs)
        clear = softmax_gap(value[winner], value[loser], self.options.tau) > MIN_GAP
        signal = torch.zeros(len(value))
        signal[winner[clear]], signal[loser[clear]] = 1.0, -1.0
        signal = signal.view(len(tree), len(edge))
        group = rollout.group.view(-1, len(tree.leaf))[rollout.trees, 0]
        return transitions(tree, signal, signal != 0, group, rollout.cond)

    def values(self, rollout: Rollout) -> Tensor:
        """Return the values of all nodes, NaN where no leaf below is valid. (N, n) float64, CPU"""
        leaves = len(rollout.tree.leaf)
        reward, valid = (t.cpu().view(-1, leaves) for t in (rollout.reward, rollout.valid))
        return node_values(rollout, reward, valid, "uniform")

    def loss(self, models: Models, batch: Transitions) -> tuple[Tensor, Metrics]:
        first = batch.advantage.view(-1, 2)[:, 0] > 0  # a pair lies under its parent
        cond, sigma, parent = batch.cond.take(batch.prompt), batch.sigma, batch.parent
        x = batch.x[parent].float()

        def step(v: Tensor) -> tuple[Tensor, Tensor]:
            return self.kernel.step(x, v.float()[parent], sigma[parent], batch.sigma_next, batch.g)

        mean, std = step(models.policy(batch.x, sigma, cond))
        with torch.no_grad():
            mean_ref, _ = step(models.reference(batch.x, sigma, cond))
        ratio = log_ratio(batch.x_next.float(), mean, mean_ref, std).view(-1, 2)
        winner, loser = torch.where(first[:, None], ratio, ratio.flip(1)).unbind(1)
        loss = spo_loss(winner, loser)
        with torch.no_grad():
            excess, size = ratio.expm1(), x[0].numel()
            metrics = {
                "policy/log_ratio_best": winner.mean() * size,
                "policy/log_ratio_worst": loser.mean() * size,
                "policy/ranked_right": (winner > loser).float().mean(),
                "policy/clip_share": (excess.abs() > CLIP).float().mean(),
            }
        return loss.mean(), metrics

"""GRPO on the denoising steps of a flow: Flow-GRPO (2505.05470) and what was built on it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import GRPOOptions, KLOnOptions
from flowrl.functional.gaussian import (
    latent_kl,
    latent_kl_no_dt,
    log_ratio,
    ratio_norm,
)
from flowrl.functional.sde import Step, StepKernel, squared_distance
from flowrl.objectives.advantage import image_advantages, tie_break_noise, top_share
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.selective_kl import kl_weights
from flowrl.objectives.tree_credit import tree_credit
from flowrl.trajectory import Metrics, Rollout, Transitions, Tree, leaves_below, transitions
from flowrl.utils.devices import send

CONFIDENT = 5.0  # nats, above which an error is not pushed away harder


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic bound -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO is 1707.06347. log_ratio, advantage: (N,); clips: numbers, or (N,) where they depend on the
    step. -> loss (N,), and clipped (N,) bool: True where the bound holds and the gradient is 0.
    """
    # r - 1, not r: published clips (1e-6) are near the distance of fp32 numbers around 1.
    excess = log_ratio.expm1()
    bounded = excess.clamp(min=-clip_low).clamp(max=clip_high)
    gain = torch.minimum(excess * advantage, bounded * advantage)
    return -advantage - gain, bounded * advantage < excess * advantage


def trusted_surrogate(
    log_ratio: Tensor, kl: Tensor, advantage: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """Return -r A, without the steps that would move further from the sampling policy.

    Flow-DPPO (2606.11025): a step is dropped where kl > bound and r > 1 for A > 0, or r < 1 for
    A < 0. The exact KL of two Gaussians decides, so noise does not, as it does when a ratio is
    clipped; steps that lead back always stay. log_ratio, kl, advantage: (N,). -> loss (N,), and
    dropped (N,) bool.
    """
    dropped = (kl > bound) & (log_ratio * advantage > 0)
    return (-log_ratio.exp() * advantage).masked_fill(dropped, 0.0), dropped


def push_confident(advantage: Tensor, nats: Tensor, alpha: float) -> Tensor:
    """Return advantages, the negative ones times 1 + alpha nats, nats within 0 to CONFIDENT. (E,)

    ACE (2602.21420): errors that the policy has become sure of are pushed away harder than those
    it still explores. nats: (E,), log pi / pi_reference of the step that was drawn. With d the
    means' distance over the std, it is normal with mean d^2 / 2 and std d: the noise decides until
    d^2 / 2 is some nats, and the bound keeps a single draw from deciding then.
    """
    return torch.where(advantage < 0, advantage * (1 + alpha * nats.clamp(0, CONFIDENT)), advantage)


def velocity_gain(step: Step, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Tensor:
    """Return d mean / d velocity of a step, one number for all elements of a latent. (E,)

    sigma, sigma_next, g: (E,). Read off the kernel, whose mean is linear in the velocity; negative,
    since denoising walks against it.
    """
    x = torch.zeros_like(sigma)[:, None]
    (mean_one, _), (mean_zero, _) = (step(x, v, sigma, sigma_next, g) for v in (x + 1, x))
    return (mean_one - mean_zero).squeeze(1)


def mean_one(weight: Tensor, move: Tensor) -> Tensor:
    """Scale the weights of edges so that their mean over the moves is 1.

    weight: (E,); move: (E,) long, the move of each edge.

    TempFlow-GRPO (2508.04324) weights a step by its std. Its code has 2.25 sigma_t sqrt|dt|, where
    2.25 is 1 / mean only for ten steps at shift 3 and noise level 0.7. GRPO-Guard (2510.22319)
    weights a step by 1 / |dt|, to make the gradients of all steps equally large: for Flow-SDE this
    is proportional to 1 / |velocity_gain|, except in the step from sigma = 1; for CPS it is not.
    """
    _, number, size = move.unique(return_inverse=True, return_counts=True)
    return weight / ((weight / size[number]).sum() / len(size))


def edge_pull(rollout: Rollout, kl_on: KLOnOptions | None) -> Tensor | None:
    """Return the KL weights of this process's trained edges, None for ones. (R, e) fp32

    An edge has the mean weight of the images below it.
    """
    if kl_on is None:
        return None
    tree = rollout.tree
    weight = kl_weights(rollout, kl_on, torch.ones(len(rollout.reward), dtype=torch.bool))
    below = leaves_below(tree.parent, tree.leaf)[tree.edge].to(weight)
    return weight.view(-1, len(tree.leaf))[rollout.trees.cpu()] @ below.T / below.sum(1)


@dataclass(frozen=True)
class GRPO:
    """Clipped surrogate of each trained step, weighted by its advantage."""

    options: GRPOOptions
    kernel: StepKernel  # the rollout's

    @property
    def needs(self) -> Needs:
        reference = self.options.kl_coef > 0 or self.options.error_confidence > 0
        return Needs(states="transitions", ratio=True, reference=reference)

    def prepare(self, rollout: Rollout) -> Transitions:
        """Return the trained edges with their advantages, those of one parent side by side.

        Edges without advantage are dropped: they have no gradient, but may cost a forward and a
        backward. They stay when the pull to the reference needs them.
        """
        tree, options, local = rollout.tree, self.options.advantage, rollout.trees.cpu()
        plain = (options.scope, options.edges, options.keep) == ("prompt", "node", "all")
        if plain and len(tree.leaf) == 1:
            # The steps of a chain have the advantage of its image.
            of_image, _ = image_advantages(rollout, options)
            advantage = of_image[:, None].expand(-1, len(tree.edge))
            keep = torch.ones_like(advantage, dtype=torch.bool)
        else:
            advantage, keep = tree_credit(rollout, options)
        if self.options.kl_coef == 0:
            keep = keep & (advantage != 0)
        keep = self.most_telling(rollout, advantage, keep)
        group = rollout.group.view(-1, len(tree.leaf))[rollout.trees, 0]
        return transitions(
            tree, advantage[local], keep[local], group, rollout.cond, self.weights(tree),
            edge_pull(rollout, self.options.kl_on),
        )  # fmt: skip

    def loss(self, models: Models, batch: Transitions) -> tuple[Tensor, Metrics]:
        cond, sigma, parent = batch.cond.take(batch.prompt), batch.sigma, batch.parent
        x, dt = batch.x[parent].float(), batch.sigma_next - sigma[parent]

        def step(v: Tensor) -> tuple[Tensor, Tensor]:
            return self.kernel.step(x, v, sigma[parent], batch.sigma_next, batch.g)

        # One forward a parent serves all its children.
        v = models.policy(batch.x, sigma, cond).float()[parent]
        mean, std = step(v)
        normalised, size = self.options.ratio == "normalised", x[0].numel()
        form = ratio_norm if normalised else log_ratio
        x_next, mean_old, advantage = batch.x_next.float(), batch.mean_old, batch.advantage
        ratio = form(x_next, mean, mean_old, std)
        if self.needs.reference:
            v_ref = models.reference(batch.x, sigma, cond).float()[parent]
            mean_ref, _ = step(v_ref)
        if self.options.error_confidence > 0:
            nats = size * log_ratio(x_next, mean_old, mean_ref, std)
            advantage = push_confident(advantage, nats, self.options.error_confidence)
        if self.options.trust_nats is None:
            clip = self.clip(size, std)
            surrogate, clipped = clipped_surrogate(ratio, advantage, clip, clip)
        else:
            moved, bound = latent_kl(mean.detach(), mean_old, std), self.options.trust_nats
            surrogate, clipped = trusted_surrogate(ratio, moved, advantage, bound / size)
        loss = (batch.weight * surrogate).mean()
        metrics = _by_step(batch.step, log_ratio=ratio.detach(), clipped=clipped.float())
        nats = ratio.detach() * size / (std if normalised else 1)
        metrics["policy/ratio_error_max"] = nats.abs().max()
        if self.options.kl_coef > 0:
            kl = self.kl(v, v_ref, mean, mean_ref, std, dt)
            loss = loss + self.options.kl_coef * (batch.pull * kl).mean()
            metrics["policy/kl"] = kl.detach().mean()
        return loss, metrics

    def most_telling(self, rollout: Rollout, advantage: Tensor, keep: Tensor) -> Tensor:
        """Mark the edges of all trees to learn from: `step_share` of them, of those in `keep`.

        D3S (2509.22115), with the velocity's effect on a step in place of a token's entropy.
        advantage, keep: (N, e). Of equal edges those of random trees.
        """
        if self.options.step_share == 1:
            return keep
        gain = velocity_gain(self.kernel.step, *_ends(rollout.tree)).abs()
        size = (advantage.abs() * gain).masked_fill(~keep, -1.0)
        lot = tie_break_noise(rollout).view(len(size), -1)[:, :1].expand_as(size)
        chosen = top_share(size.flatten(), self.options.step_share, lot.flatten())
        return keep & chosen.view_as(keep)

    def weights(self, tree: Tree) -> Tensor:
        """Return the weights of the trained edges, with mean 1 over the steps. (e,) fp32"""
        if self.options.step_weight == "none":
            return torch.ones(len(tree.edge))
        (sigma, sigma_next, g), move = _ends(tree), tree.move[tree.edge]
        nothing = torch.zeros_like(sigma)[:, None]
        _, std = self.kernel.step(nothing, nothing, sigma, sigma_next, g)
        if self.options.step_weight == "noise":
            return mean_one(std, move).float()
        # The size of the gradient of a step's ratio on the velocity.
        pull = velocity_gain(self.kernel.step, sigma, sigma_next, g).abs()
        normalised = self.options.ratio == "normalised"
        return mean_one(1 / (pull if normalised else pull / std), move).float()

    def clip(self, latent_elements: int, std: Tensor) -> float | Tensor:
        """Return the clip on ratios of latent means: a number, or (B,) like std.

        clip_nats bounds the log-ratio of the whole latent; with ratio normalised, log-ratio + KL.
        """
        clip = self.options.clip_nats / latent_elements
        return std * clip if self.options.ratio == "normalised" else clip

    def kl(
        self, v: Tensor, v_ref: Tensor, mean: Tensor, mean_ref: Tensor, std: Tensor, dt: Tensor
    ) -> Tensor:
        """Return the divergence from the reference as `kl_form` says. (N,)"""
        if self.options.kl_form == "velocity":
            return squared_distance(v, v_ref)
        if self.options.kl_form == "latent_dt":
            return latent_kl(mean, mean_ref, std)
        return latent_kl_no_dt(mean, mean_ref, std, dt)


def _ends(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigma before and after each trained edge, and g of its noise. (e,) float64 each"""
    edge, sigmas = tree.edge, tree.sigmas.cpu().double()
    before, after = (sigmas[tree.step[node]] for node in (tree.parent[edge], edge))
    return before, after, tree.g.cpu()[edge].double()


def _by_step(step: Tensor, *, log_ratio: Tensor, clipped: Tensor) -> Metrics:
    """Return the ratios' spread and clip share, over all rows and for each denoising step.

    step: (E,) long, on the CPU.
    """
    metrics: Metrics = {
        "policy/ratio_mean": log_ratio.exp().mean(),
        "policy/ratio_std": log_ratio.std(correction=0),
        "policy/clip_share": clipped.mean(),
    }
    steps, place = step.unique(return_inverse=True)
    rows = send(place, log_ratio.device)
    counts = send(place.bincount(minlength=len(steps)), log_ratio.device)

    def means(values: Tensor) -> Tensor:
        return values.new_zeros(len(steps)).index_add(0, rows, values) / counts

    spread = means((log_ratio - means(log_ratio)[rows]).square()).sqrt()
    shares = means(clipped)
    for number, i in enumerate(steps.tolist()):
        metrics[f"policy/ratio_std/step_{i}"] = spread[number]
        metrics[f"policy/clip_share/step_{i}"] = shares[number]
    return metrics

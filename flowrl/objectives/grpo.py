"""GRPO on the denoising steps of a flow: Flow-GRPO (2505.05470) and what was built on it."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import (
    latent_kl,
    latent_kl_no_dt,
    log_ratio,
    ratio_norm,
    velocity_kl,
)
from flowrl.functional.sde import StepKernel
from flowrl.objectives.base import Needs
from flowrl.objectives.step_weight import equal_weight, noise_weight, velocity_gain
from flowrl.objectives.surrogate import (
    clip_from_nats,
    clipped_surrogate,
    ratio_norm_clip_from_nats,
)
from flowrl.objectives.tree_credit import Credit
from flowrl.trajectory import Metrics, Rollout, Transitions, Tree, transitions

KlForm = Literal["velocity", "latent_dt", "latent_no_dt"]
RatioForm = Literal["gaussian", "normalised"]
StepWeight = Literal["none", "noise", "equal"]


class GRPO:
    """Clipped surrogate of each trained step, weighted by the advantage that credit gives it.

    kernel: the rollout's. ratio: of the two Gaussians, or GRPO-Guard's (2510.22319), which is
    centred and does not grow where a step has little noise. clip_nats: bound on one step's
    log-ratio summed over the latent; clip_eps: the same on the ratio of latent means, as papers
    give it. Exactly one is not None. step_weight: of each step's loss, see
    `flowrl.objectives.step_weight`. kl_coef, kl_form: pull to the frozen network, never weighted;
    velocity is UniGRPO's (2603.23500).
    """

    def __init__(
        self,
        *,
        kernel: StepKernel,
        credit: Credit,
        ratio: RatioForm = "gaussian",
        clip_nats: float | None = 6.5,
        clip_eps: float | None = None,
        step_weight: StepWeight = "none",
        kl_coef: float = 0.0,
        kl_form: KlForm = "velocity",
    ):
        if (clip_nats is None) == (clip_eps is None):
            raise ValueError(f"give one of clip_nats and clip_eps, got {clip_nats} and {clip_eps}")
        self.kernel, self.credit = kernel, credit
        self.ratio, self.step_weight = ratio, step_weight
        self.clip_nats, self.clip_eps = clip_nats, clip_eps
        self.kl_coef, self.kl_form = kl_coef, kl_form
        self.needs = Needs(states="transitions", ratio=True, reference=kl_coef > 0)

    def prepare(self, rollout: Rollout) -> Transitions:
        """The trained edges with their advantages, those of one parent side by side.

        Edges without advantage are dropped: they have no gradient, but may cost a forward and a
        backward. They stay when the pull to the reference needs them.
        """
        tree = rollout.tree
        advantage, keep = self.credit(rollout)
        if self.kl_coef == 0:
            keep = keep & (advantage != 0)
        device = tree.x.device
        group = rollout.group.view(-1, len(tree.leaf))[rollout.trees, 0]
        return transitions(
            tree,
            advantage.to(device),
            keep.to(device),
            group.to(device),
            rollout.cond,
            self.weights(tree),
        )

    def loss(
        self,
        policy: VelocityField,
        batch: Transitions,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        cond, sigma, parent = batch.cond.take(batch.prompt), batch.sigma, batch.parent
        x, dt = batch.x[parent].float(), batch.sigma_next - sigma[parent]

        def step(v: Tensor) -> tuple[Tensor, Tensor]:
            return self.kernel.step(x, v, sigma[parent], batch.sigma_next, batch.g)

        # One forward a parent serves all its children.
        v = policy(batch.x, sigma, cond).float()[parent]
        mean, std = step(v)
        guard, size = self.ratio == "normalised", x[0].numel()
        form = ratio_norm if guard else log_ratio
        ratio = form(batch.x_next.float(), mean, batch.mean_old, std)
        clip = self.clip(size, std)
        surrogate, clipped = clipped_surrogate(ratio, batch.advantage, clip, clip)
        loss = (batch.weight * surrogate).mean()
        metrics = _by_step(batch.step, log_ratio=ratio.detach(), clipped=clipped.float())
        nats = ratio.detach() * size / (std if guard else 1)
        metrics["policy/ratio_error_max"] = nats.abs().max()
        if self.kl_coef > 0:
            v_ref = reference(batch.x, sigma, cond).float()[parent]
            kl = self.kl(v, v_ref, mean, step(v_ref)[0], std, dt).mean()
            loss = loss + self.kl_coef * kl
            metrics["policy/kl"] = kl.detach()
        return loss, metrics

    def weights(self, tree: Tree) -> Tensor:
        """(e,) fp32, what each trained edge counts: a function of the plan and the schedule."""
        edge = tree.edge
        if self.step_weight == "none":
            return torch.ones_like(tree.g[edge])
        before, move, g = tree.parent[edge], tree.move[edge], tree.g[edge].double()
        sigma, sigma_next = (tree.sigmas[tree.step[node]].double() for node in (before, edge))
        nothing = torch.zeros_like(sigma)[:, None]
        _, std = self.kernel.step(nothing, nothing, sigma, sigma_next, g)
        if self.step_weight == "noise":
            return noise_weight(std, move).float()
        pull = velocity_gain(self.kernel.step, sigma, sigma_next, g).abs()
        return equal_weight(pull if self.ratio == "normalised" else pull / std, move).float()

    def clip(self, latent_elements: int, std: Tensor) -> float | Tensor:
        """The clip on ratios of latent means that is in force: a number, or (B,) like std."""
        if self.clip_eps is not None:
            return self.clip_eps
        assert self.clip_nats is not None
        if self.ratio == "normalised":
            return ratio_norm_clip_from_nats(self.clip_nats, latent_elements, std)
        return clip_from_nats(self.clip_nats, latent_elements)

    def kl(
        self, v: Tensor, v_ref: Tensor, mean: Tensor, mean_ref: Tensor, std: Tensor, dt: Tensor
    ) -> Tensor:
        """(N,) divergence from the reference in the form that was asked for."""
        if self.kl_form == "velocity":
            return velocity_kl(v, v_ref)
        if self.kl_form == "latent_dt":
            return latent_kl(mean, mean_ref, std)
        return latent_kl_no_dt(mean, mean_ref, std, dt)


def _by_step(step: Tensor, *, log_ratio: Tensor, clipped: Tensor) -> Metrics:
    """Ratio spread and clip share, over all rows and for each denoising step of the batch."""
    metrics: Metrics = {
        "policy/ratio_mean": log_ratio.exp().mean(),
        "policy/ratio_std": log_ratio.std(correction=0),
        "policy/clip_share": clipped.mean(),
    }
    for i in step.unique().tolist():
        rows = step == i
        metrics[f"policy/ratio_std/step_{i}"] = log_ratio[rows].std(correction=0)
        metrics[f"policy/clip_share/step_{i}"] = clipped[rows].mean()
    return metrics

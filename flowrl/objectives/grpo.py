"""GRPO on the denoising steps of a flow: Flow-GRPO (2505.05470), and BranchGRPO's trees."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.advantage import Scope, clip_advantage, group_advantage
from flowrl.functional.gaussian import latent_kl, latent_kl_no_dt, log_ratio, velocity_kl
from flowrl.functional.sde import StepKernel
from flowrl.functional.surrogate import clip_from_nats, clipped_surrogate
from flowrl.objectives.base import Needs
from flowrl.trajectory import Metrics, Rollout, Transitions

KlForm = Literal["velocity", "latent_dt", "latent_no_dt"]


class GRPO:
    """Clipped surrogate of each trained step, weighted by the image's advantage in its group.

    kernel: the rollout's. clip_nats: bound on one step's log-ratio summed over the latent;
    clip_eps: the same on the ratio of latent means, as papers give it. Exactly one is not None.
    kl_coef, kl_form: pull to the frozen network. advantage_scope: whose std divides.
    """

    def __init__(
        self,
        *,
        kernel: StepKernel,
        clip_nats: float | None = 6.5,
        clip_eps: float | None = None,
        kl_coef: float = 0.0,
        kl_form: KlForm = "velocity",
        advantage_scope: Scope = "group",
        advantage_clip: float = 5.0,
    ):
        if (clip_nats is None) == (clip_eps is None):
            raise ValueError(f"give one of clip_nats and clip_eps, got {clip_nats} and {clip_eps}")
        self.kernel = kernel
        self.clip_nats, self.clip_eps = clip_nats, clip_eps
        self.kl_coef, self.kl_form = kl_coef, kl_form
        self.advantage_scope: Scope = advantage_scope
        self.advantage_clip = advantage_clip
        self.needs = Needs(states="transitions", ratio=True, reference=kl_coef > 0)

    def prepare(self, rollout: Rollout) -> Transitions:
        """Every trained edge gets the mean advantage of the images below it.

        Edges without advantage are dropped: they have no gradient, but cost a forward and a
        backward. They stay when the pull to the reference needs them.
        """
        tree = rollout.tree
        advantage = group_advantage(
            rollout.reward, rollout.valid, rollout.group, scope=self.advantage_scope
        )
        own = clip_advantage(advantage, self.advantage_clip)[rollout.rows].to(tree.x.device)
        parent = tree.parent[tree.edge]
        batch = Transitions(
            x=tree.x[parent],
            x_next=tree.x[tree.edge],
            mean_old=tree.mean_old,
            step=tree.step[parent],
            advantage=_mean_below(tree.leaves_below(), own)[tree.edge],
            prompt=tree.prompt[tree.edge],
            group=_group_of_prompt(rollout)[tree.prompt[tree.edge]],
            sigmas=tree.sigmas,
            g=tree.g,
            cond=rollout.cond,
        )
        return batch if self.kl_coef > 0 else batch.take(batch.advantage != 0)

    def loss(
        self,
        policy: VelocityField,
        batch: Transitions,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        x, cond = batch.x, batch.cond.take(batch.prompt)
        sigma, sigma_next = batch.sigmas[batch.step], batch.sigmas[batch.step + 1]
        g = batch.g[batch.step]
        v = policy(x, sigma, cond).float()
        mean, std = self.kernel.step(x.float(), v, sigma, sigma_next, g)
        ratio = log_ratio(batch.x_next.float(), mean, batch.mean_old, std)
        clip = self.clip(x[0].numel())
        surrogate, clipped = clipped_surrogate(ratio, batch.advantage, clip, clip)
        loss = surrogate.mean()
        metrics = _by_step(batch.step, log_ratio=ratio.detach(), clipped=clipped.float())
        metrics["policy/ratio_error_max"] = ratio.detach().abs().max() * x[0].numel()
        if self.kl_coef > 0:
            v_ref = reference(x, sigma, cond).float()
            mean_ref, _ = self.kernel.step(x.float(), v_ref, sigma, sigma_next, g)
            kl = self.kl(v, v_ref, mean, mean_ref, std, sigma_next - sigma).mean()
            loss = loss + self.kl_coef * kl
            metrics["policy/kl"] = kl.detach()
        return loss, metrics

    def clip(self, latent_elements: int) -> float:
        """The clip on ratios of latent means that is in force."""
        if self.clip_eps is not None:
            return self.clip_eps
        assert self.clip_nats is not None
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


def _group_of_prompt(rollout: Rollout) -> Tensor:
    """(P,) long: the group that each of this process's prompts stands for."""
    group = torch.zeros(len(rollout.prompts), dtype=torch.long, device=rollout.tree.x.device)
    group[rollout.tree.prompt[rollout.tree.leaf]] = rollout.group[rollout.rows].to(group.device)
    return group


def _mean_below(below: Tensor, value: Tensor) -> Tensor:
    """Mean of the leaves' values below each node: (M, L) bool, (L,) -> (M,)."""
    weight = below.to(value)
    return weight @ value / weight.sum(1)


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

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
from flowrl.functional.sde import Step, StepKernel
from flowrl.objectives.base import Needs
from flowrl.objectives.tree_credit import TreeCredit
from flowrl.trajectory import Metrics, Rollout, Transitions, Tree, transitions

# --- The clipped policy objective, and clip ranges that mean the same for any latent size ------


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (1707.06347).

    log_ratio, advantage: (N,); clips: numbers, or (N,) where they depend on the step.
    -> loss (N,), and clipped (N,) bool: True where the bound holds and the gradient is 0.
    """
    # r - 1, not r: published clips (1e-6) are near the distance of fp32 numbers around 1.
    excess = log_ratio.expm1()
    bounded = excess.clamp(min=-clip_low).clamp(max=clip_high)
    gain = torch.minimum(excess * advantage, bounded * advantage)
    return -advantage - gain, bounded * advantage < excess * advantage


def clip_from_nats(nats: float, latent_elements: int) -> float:
    """Clip on the mean ratio that bounds the log-ratio of the whole latent to about `nats`."""
    return nats / latent_elements


def ratio_norm_clip_from_nats(nats: float, latent_elements: int, std: Tensor) -> Tensor:
    """The same for `ratio_norm`, where it bounds log-ratio + KL; one value per step. (B,)

    GRPO-Guard's published eps of 2e-6 and 4e-6 bound `ratio_norm` itself, alike at every step:
    eps D / std nats, with 2e-6 and 65,536 elements 0.13 nats at std 1 and 0.66 at std 0.2.
    """
    return std * clip_from_nats(nats, latent_elements)


def cps_raw_clip_from_nats(nats: float, latent_elements: int, std: Tensor) -> Tensor:
    """The same for `cps_raw_log_ratio`, which is 2 std^2 times the Gaussian one. (B,)"""
    return 2 * std**2 * clip_from_nats(nats, latent_elements)


# --- What each denoising step counts: weights of edges whose mean over the trained steps is 1 --


def velocity_gain(step: Step, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Tensor:
    """d mean / d velocity of a step, one number for all elements of a latent. (E,)

    sigma, sigma_next, g: (E,). Read off the kernel, whose mean is linear in the velocity; negative,
    since denoising walks against it.
    """
    x = torch.zeros_like(sigma)[:, None]
    (there, _), (here, _) = (step(x, v, sigma, sigma_next, g) for v in (x + 1, x))
    return (there - here).squeeze(1)


def noise_weight(std: Tensor, move: Tensor) -> Tensor:
    """std / its mean: the noise-level weight of TempFlow-GRPO (2508.04324). (E,)

    std: (E,); move: (E,) long. Its code has 2.25 sigma_t sqrt|dt|, and 2.25 is 1 / mean for ten
    steps of SD3 at level 0.7 alone. With it a Gaussian ratio pulls by the gain of its step, as
    `ratio_norm` does without.
    """
    return _mean_one(std, move)


def equal_weight(pull: Tensor, move: Tensor) -> Tensor:
    """1 / pull over its mean, so that all steps pull the velocity alike. (E,)

    pull: (E,) size of the gradient of a step's ratio on the velocity, |gain| / std of a Gaussian
    one, |gain| of `ratio_norm`; move: (E,) long. GRPO-Guard (2510.22319) divides by |dt| instead,
    which for Flow-SDE is the same but in the step from sigma = 1, and for CPS is not.
    """
    return _mean_one(1 / pull, move)


def _mean_one(weight: Tensor, move: Tensor) -> Tensor:
    _, number, size = move.unique(return_inverse=True, return_counts=True)
    return weight / ((weight / size[number]).sum() / len(size))


# --- GRPO on the denoising steps of a flow: Flow-GRPO (2505.05470) and what was built on it ----

KlForm = Literal["velocity", "latent_dt", "latent_no_dt"]
RatioForm = Literal["gaussian", "normalised"]
StepWeight = Literal["none", "noise", "equal"]


class GRPO:
    """Clipped surrogate of each trained step, weighted by the advantage that credit gives it.

    kernel: the rollout's. ratio: of the two Gaussians, or GRPO-Guard's (2510.22319), which is
    centred and does not grow where a step has little noise. clip_nats: bound on one step's
    log-ratio summed over the latent; clip_eps: the same on the ratio of latent means, as papers
    give it. Exactly one is not None. step_weight: of each step's loss, see
    `flowrl.objectives.grpo`. kl_coef, kl_form: pull to the frozen network, never weighted;
    velocity is UniGRPO's (2603.23500).
    """

    def __init__(
        self,
        *,
        kernel: StepKernel,
        credit: TreeCredit,
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

"""A policy small enough to write out, its rollouts, and its log-density by another road."""

import math
from dataclasses import replace

import torch
from toy_rollout import rollout_of

from flowrl.functional.sde import KERNELS
from flowrl.sampling.sampler import Schedule, sample_tree
from flowrl.trajectory import Conditioning, Rollout, Transitions, transitions
from flowrl.trees.plan import Step, TreePlan

D, T, GROUP, PROMPTS = 6, 4, 3, 2
L = GROUP * PROMPTS
REWARD = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.2, 0.7])


class Toy(torch.nn.Module):
    """v = w * x + sigma * b + c[prompt], in float64; velocities of training are in fp32."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w, self.b = (
            torch.nn.Parameter(torch.randn(D, generator=generator).double() / 2) for _ in range(2)
        )

    def forward(self, x, sigma, cond):
        return self.w * x + sigma[:, None] * self.b + cond.tensors["c"]


def cond() -> Conditioning:
    return Conditioning(tensors={"c": torch.arange(PROMPTS * D).view(PROMPTS, D).double() / 10})


ODE, NOISY = Step(), Step(noise=True, train=True)
CHAINS = TreePlan(GROUP, (NOISY,) * (T - 1) + (ODE,))
# Three images of a prompt from one root, trained at the split and after it.
SPLIT = TreePlan(1, (replace(NOISY, branch=GROUP), NOISY, ODE, ODE))


@torch.no_grad()
def collect(toy: Toy, kernel: str = "flow_sde", reward=REWARD, plan=CHAINS) -> Rollout:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.arange(PROMPTS).repeat_interleave(plan.roots)

    def noise(*_):
        return torch.randn(len(prompt), D, generator=generator).double()

    sigmas = torch.linspace(1, 0, T + 1).double()
    schedule = Schedule(sigmas=sigmas, kernel=KERNELS[kernel], noise_level=0.6)

    def velocity(x, sigma, prompt):
        return toy(x, sigma.expand(len(x)), cond().take(prompt))

    tree = sample_tree(velocity, noise(), prompt, plan, schedule, noise)
    # The sampler computes in fp32; the toy's means are wanted to the last digit of fp64.
    before = tree.parent[tree.edge]
    x = tree.x[:, before].flatten(0, 1)
    rows = len(tree)
    steps = (sigmas[tree.step[before]], sigmas[tree.step[tree.edge]], tree.g[tree.edge])
    s, s1, g = (t.repeat(rows) for t in steps)
    v = toy(x, s, cond().take(prompt.repeat_interleave(len(before))))
    mean, _ = schedule.kernel.step(x, v, s, s1, g)
    tree = replace(tree, mean_old=mean.view_as(tree.x[:, before]))
    return rollout_of(tree, reward, cond())


def every_edge(rollout: Rollout) -> Transitions:
    tree = rollout.tree
    ones = torch.ones(len(tree), len(tree.edge))
    return transitions(tree, ones, ones.bool(), tree.prompt, rollout.cond)


def log_density(toy, rollout, kernel, t: Transitions | None = None):
    """Mean over the latent of log N(x_next; mean(x), std^2) for the edges t, by default every
    trained one, written out."""
    t = every_edge(rollout) if t is None else t
    x, s, prompt = (rows[t.parent] for rows in (t.x, t.sigma[:, None], t.prompt))
    s1, g = t.sigma_next[:, None], t.g[:, None]
    v = toy(x, s[:, 0], rollout.cond.take(prompt))
    x0, eps = x - s * v, x + (1 - s) * v
    if kernel == "cps":
        std = s1 * torch.sin(g * math.pi / 2)
        mean = (1 - s1) * x0 + s1 * torch.cos(g * math.pi / 2) * eps
    elif kernel == "overshoot":
        below = (s1 - g**2 / 2 * (s - s1)).clamp(min=0)
        keep = (1 - s1) / (1 - below)
        std = (s1**2 - (keep * below) ** 2).sqrt()
        mean = keep * (x + (below - s) * v)
    else:
        std = g * (s - s1).sqrt()
        mean = x - (s - s1) * (v + g**2 / (2 * s) * eps)
    z = (t.x_next - mean) / std
    return (-z.square() / 2 - std.log() - math.log(2 * math.pi) / 2).mean(1)


def group_advantages(reward: torch.Tensor) -> torch.Tensor:
    rows = reward.view(PROMPTS, GROUP).double()
    centred = rows - rows.mean(1, keepdim=True)
    return (centred / (rows.std(1, correction=0, keepdim=True) + 1e-4)).flatten()

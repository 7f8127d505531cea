"""A velocity without a network, noise by name, and a chain sampler written out for comparison."""

import hashlib
from itertools import pairwise

import torch
from torch import Tensor

from flowrl.functional.sde import KERNELS, StepKernel, lift, ode_step
from flowrl.sampling.sampler import Schedule, sample_tree
from flowrl.trajectory import Tree
from flowrl.trees.plan import TreePlan

D = 5
FLOW = KERNELS["flow_sde"]


def schedule(steps: int, kernel: StepKernel = FLOW, level: float = 0.5) -> Schedule:
    return Schedule(sigmas=torch.linspace(1, 0, steps + 1), kernel=kernel, noise_level=level)


def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
    return 0.3 * x + 0.5 * x / (1 + x * x) + sigma + prompt.to(x)[:, None]


class Counting:
    def __init__(self):
        self.rows = self.calls = 0

    def __call__(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        self.rows += len(x)
        self.calls += 1
        return velocity(x, sigma, prompt)


def named_noise(roots: list[int]):
    """Noise for trees with these root numbers, a function of (root, path, step, role) alone."""

    def noise(path: tuple[int, ...], step: int, role: str) -> Tensor:
        rows = []
        for root in roots:
            name = hashlib.blake2b(repr((root, path, step, role)).encode(), digest_size=6).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(name, "big"))
            rows.append(torch.randn(D, generator=generator))
        return torch.stack(rows)

    return noise


def grown(
    plan: TreePlan,
    numbers: Schedule | None = None,
    *,
    prompts: int = 2,
    field=velocity,
) -> Tree:
    roots = list(range(prompts * plan.roots))
    prompt = torch.arange(prompts).repeat_interleave(plan.roots)
    x = named_noise([p if plan.same_noise else r for r, p in enumerate(prompt.tolist())])
    return sample_tree(
        field,
        x((), 0, "init"),
        prompt,
        plan,
        numbers or schedule(len(plan.steps)),
        named_noise(roots),
    )


def chain(x: Tensor, prompt: Tensor, numbers: Schedule, noises: dict[int, Tensor]) -> Tensor:
    """One latent a row from sigma to sigma: no tree, no plan. noises: of the steps that have
    some -> clean latents."""
    for i, (s, s_next) in enumerate(pairwise(numbers.sigmas)):
        v = velocity(x, s, prompt)
        kernel = numbers.kernel.step if i in noises else ode_step
        mean, std = kernel(x, v, s, s_next, numbers.g(i, i + 1))
        x = mean + lift(std, mean) * noises[i] if i in noises else mean
    return x

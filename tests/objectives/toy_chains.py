"""Chains of a small network in float64, and a reward of which everything is known."""

import torch
import toy_rollout

from flowrl.functional.noise import noise_seed
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Trajectories
from flowrl.objectives.reward_backprop.base import tangent
from flowrl.trajectory import Conditioning, Rollout, Tree

D, T, N, PROMPTS = 3, 5, 6, 2
F64 = torch.float64


class Toy(torch.nn.Module):
    """v = tanh(x W) (1 + sigma) + sigma b + c[prompt]."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = torch.nn.Parameter(torch.randn(D, D, generator=generator).to(F64))
        self.b = torch.nn.Parameter(torch.randn(D, generator=generator).to(F64))

    def forward(self, x, sigma, cond):
        inner = torch.tanh(x @ self.w) * (1 + sigma[:, None])
        return inner + sigma[:, None] * self.b + cond.tensors["c"]


def cond() -> Conditioning:
    return Conditioning(tensors={"c": torch.arange(PROMPTS * D).view(PROMPTS, D).to(F64) / 10})


@torch.no_grad()
def chains(toy, steps: int = T, count: int = N, forwards=1) -> Trajectories:
    generator = torch.Generator().manual_seed(1)
    sigmas = torch.linspace(1, 0, steps + 1, dtype=F64) ** 1.5
    prompt = torch.arange(count) % PROMPTS
    x = [torch.randn(count, D, generator=generator).to(F64)]
    for a, b in zip(sigmas[:-1], sigmas[1:], strict=True):
        x.append(x[-1] + (b - a) * toy(x[-1], a.expand(count), cond().take(prompt)))
    batch = Trajectories(
        x=torch.stack(x, 1),
        sigmas=sigmas,
        prompt=prompt,
        group=prompt,
        image=torch.arange(count) + 10,
        forwards=torch.ones(count, dtype=torch.long),
        cond=cond(),
        seed=noise_seed(seed=0, iteration=0, prompt="", root=0, step=0, role="learn"),
        left_out={},
    )
    return batch.with_forwards(forwards)


def reward_of(x0, prompt, words=""):
    """A reward with curvature that depends on prompt and words. (n, D) -> (n,)"""
    return torch.sin(x0 + prompt[:, None]).sum(1) + len(words) * x0.square().sum(1) / 50


def field(x0, prompt, words=""):
    with torch.enable_grad():
        x = x0.detach().requires_grad_()
        r = reward_of(x, prompt, words)
        (gradient,) = torch.autograd.grad(r.sum(), x)
    return r.detach(), gradient


def no_network(x, sigma, cond):
    raise AssertionError("this objective declares that it does not need this network")


def loss_of(objective, toy, batch, reference=no_network, *, old=no_network, reward=field):
    models = Models(policy=toy, reference=reference, old=old, reward_gradient=reward)
    loss, metrics = objective.loss(models, batch)
    assert not any(m.requires_grad for m in metrics.values())
    return loss, metrics


def gradient(loss, toy):
    found = torch.autograd.grad(loss, list(toy.parameters()), allow_unused=True)
    pairs = zip(found, toy.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def velocity(toy, batch, x, step: int):
    return toy(x, batch.sigmas[step].expand(len(x)), batch.cond.take(batch.prompt))


def full(toy, batch, first: int = 0, jacobians: bool = True):
    x = batch.x[:, first]
    for i in range(first, batch.steps):
        seen = x if jacobians else x.detach()
        x = x + (batch.sigmas[i + 1] - batch.sigmas[i]) * velocity(toy, batch, seen, i)
    return -reward_of(x, batch.prompt).mean()


def only(batch: Trajectories, row: int) -> Trajectories:
    return batch.take(torch.tensor([row]))


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def straight_through(surrogate, value):
    return value.detach() + tangent(surrogate)


def rollout_of_chains(batch: Trajectories) -> Rollout:
    steps = batch.steps + 1
    numbers = torch.arange(steps)
    tree = Tree(
        x=batch.x, prompt=batch.prompt, log_prob=torch.zeros(N, steps),
        mean_old=batch.x[:, :0], step=numbers, parent=numbers - 1, move=numbers - 1,
        g=torch.zeros(steps), leaf=numbers[-1:], noisy=numbers[:0], edge=numbers[:0],
        sigmas=batch.sigmas, forwards=0,
    )  # fmt: skip
    return toy_rollout.rollout_of(tree, torch.zeros(N), batch.cond, seed=3)

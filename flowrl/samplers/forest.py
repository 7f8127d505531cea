"""The sampler: it grows a forest of latents level by level, the whole frontier in one batch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.functional.flow import lift
from flowrl.functional.sde import ode_step
from flowrl.samplers.plan import Plan
from flowrl.trajectory import Tree

# (x (B, *latent), sigma (), prompt (B,) long) -> velocity like x
FrontierVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
# step index -> (B, *latent) fp32 standard normal noise, one row a frontier node
FrontierNoise = Callable[[int], Tensor]


@dataclass(slots=True)
class _Growth:
    """Nodes of the forest so far, a list entry a level; parents are numbered before children."""

    x: list[Tensor] = field(default_factory=list)
    parent: list[Tensor] = field(default_factory=list)
    edge: list[Tensor] = field(default_factory=list)
    mean_old: list[Tensor] = field(default_factory=list)
    count: int = 0

    def level(self, x: Tensor, parent: Tensor) -> Tensor:
        """Add a level and return its node ids."""
        nodes = torch.arange(self.count, self.count + len(x), device=x.device)
        self.count += len(x)
        self.x.append(x)
        self.parent.append(parent)
        return nodes


@torch.no_grad()
def grow(
    velocity: FrontierVelocity, x: Tensor, prompt: Tensor, plan: Plan, noise: FrontierNoise
) -> Tree:
    """Roots x (B, *latent) -> forest of B chains with T + 1 nodes each.

    x: initial noise in the dtype that latents are stored in. prompt: (B,) long. The arithmetic
    of a step is fp32; its result is cast to the storage dtype *before* anything scores it, so
    that the density is that of the latent the network will see. Steps with g = 0 are diffusers'
    Euler steps, bit for bit.
    """
    growth = _Growth()
    nodes = growth.level(x, torch.full((len(x),), -1, device=x.device))
    for i, g in enumerate(plan.g.tolist()):
        step = plan.kernel.step if g > 0 else ode_step
        v = velocity(x, plan.sigmas[i], prompt)
        mean, std = step(x.float(), v.float(), plan.sigmas[i], plan.sigmas[i + 1], plan.g[i])
        drawn = mean + lift(std, mean) * noise(i) if g > 0 else mean
        x = drawn.to(x.dtype)
        nodes = growth.level(x, nodes)
        if g > 0:
            growth.edge.append(nodes)
            growth.mean_old.append(mean)
    return _finish(growth, prompt, plan, leaf=nodes)


def _finish(growth: _Growth, prompt: Tensor, plan: Plan, leaf: Tensor) -> Tree:
    step = [torch.full((len(x),), i, device=x.device) for i, x in enumerate(growth.x)]
    latent = growth.x[0].shape[1:]
    return Tree(
        x=torch.cat(growth.x),
        step=torch.cat(step),
        parent=torch.cat(growth.parent),
        prompt=prompt.repeat(len(growth.x)),
        leaf=leaf,
        sigmas=plan.sigmas,
        g=plan.g,
        edge=torch.cat(growth.edge) if growth.edge else leaf.new_empty(0),
        mean_old=torch.cat(growth.mean_old)
        if growth.mean_old
        else growth.x[0].new_empty(0, *latent),
    )

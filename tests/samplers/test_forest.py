"""The forest that the sampler grows: its shape, its means, and what its noise-free steps are."""

import pytest
import torch

from flowrl.functional.flow import lift
from flowrl.functional.sde import KERNELS
from flowrl.samplers.forest import grow
from flowrl.samplers.plan import all_steps, make_plan, ode_plan

T, B = 4, 3
SIGMAS = torch.linspace(1, 0, T + 1)
PROMPT = torch.tensor([0, 0, 1])


def velocity(x, sigma, prompt):
    return 0.3 * x + sigma + prompt.to(x)[:, None]


def noise(step: int) -> torch.Tensor:
    return torch.randn(B, 5, generator=torch.Generator().manual_seed(step))


def grown(plan, dtype=torch.float32):
    x = torch.randn(B, 5, generator=torch.Generator().manual_seed(99)).to(dtype)
    return x, grow(velocity, x, PROMPT, plan, noise)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_are_the_stochastic_steps_drawn_around_their_means(kernel, dtype):
    plan = make_plan(SIGMAS, kernel, 0.5, all_steps(0, T))
    _, tree = grown(plan, dtype)
    assert tree.x.dtype == dtype and tree.mean_old.dtype == torch.float32
    parent = tree.parent[tree.edge]
    step = tree.step[parent]
    assert step.tolist() == [i for i in range(T - 1) for _ in range(B)]
    x, s, s1, g = tree.x[parent], tree.sigmas[step], tree.sigmas[step + 1], tree.g[step]
    v = velocity(x, lift(s, x).to(x), tree.prompt[parent])
    if dtype == torch.float32:
        mean, std = kernel.step(x, v, s, s1, g)
        assert torch.equal(mean, tree.mean_old)
        drawn = mean + lift(std, mean) * torch.cat([noise(i) for i in range(T - 1)])
        assert torch.equal(drawn, tree.x[tree.edge])


def test_every_leaf_hangs_on_a_chain_back_to_its_own_root():
    x, tree = grown(make_plan(SIGMAS, KERNELS["flow_sde"], 0.5, range(1, 3)))
    for row, leaf in enumerate(tree.leaf.tolist()):
        chain = [leaf]
        while tree.parent[chain[-1]] >= 0:
            chain.append(int(tree.parent[chain[-1]]))
        assert tree.step[chain].tolist() == list(range(T, -1, -1))
        assert tree.prompt[chain].unique().tolist() == [PROMPT[row].item()]
        assert torch.equal(tree.x[chain[-1]], x[row])
    assert bool((tree.parent[1:] < torch.arange(1, len(tree.parent))).all())
    assert len(tree.edge) == 2 * B


def test_without_noise_the_steps_are_the_schedulers_own_bit_for_bit():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(T)
    x, tree = grown(ode_plan(scheduler.sigmas, KERNELS["flow_sde"]))
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas[:-1], strict=True):
        x = scheduler.step(velocity(x, sigma, PROMPT), timestep, x, return_dict=False)[0]
    assert torch.equal(tree.x[tree.leaf], x)
    assert len(tree.edge) == 0 and tree.mean_old.shape == (0, 5)


def test_noise_is_asked_only_where_it_is_used():
    asked = []

    def record(step: int) -> torch.Tensor:
        asked.append(step)
        return noise(step)

    plan = make_plan(SIGMAS, KERNELS["cps"], 0.5, range(1, 2))
    grow(velocity, torch.zeros(B, 5), PROMPT, plan, record)
    assert asked == [1]


def test_latents_are_rounded_to_storage_and_means_are_not():
    _, tree = grown(make_plan(SIGMAS, KERNELS["flow_sde"], 0.5, all_steps(0, T)), torch.bfloat16)
    assert tree.x.dtype == torch.bfloat16
    assert not torch.equal(tree.mean_old, tree.mean_old.bfloat16().float())

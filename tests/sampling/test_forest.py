from dataclasses import replace
from functools import partial

import pytest
import torch
from any_plan import plans
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_forest import Counting, D, chain, grown, named_noise, schedule, velocity

from flowrl.functional.noise import coupled
from flowrl.functional.sde import KERNELS
from flowrl.sampling.sampler import sample_tree
from flowrl.trees.plan import (
    INDEPENDENT,
    Fan,
    NoiseCoupling,
    Step,
    TreePlan,
    continued_widths,
    count,
)

T = 6
NOISY = Step(noise=True, train=True)
ODE = Step()


def chains(roots: int = 3, steps: int = T, **options) -> TreePlan:
    return TreePlan(roots, (NOISY,) * (steps - 1) + (ODE,), **options)


def branching(*at: int, branch: int = 2, roots: int = 1, coupling=INDEPENDENT) -> TreePlan:
    split = Step(branch=branch, noise=True, coupling=coupling, train=True)
    return TreePlan(roots, tuple(split if i in at else NOISY for i in range(T - 1)) + (ODE,))


FANS = [(0, 3, {"strides": (1, 2)}), (1, 2, {"length": 2}), (1, 2, {}), (3, 2, {})]
COMB = TreePlan(2, (ODE,) * T, fans=tuple(Fan(step=i, width=w, **more) for i, w, more in FANS))
PLANS = {
    "chains": chains(),
    "tree": branching(0, 2, 3),
    "two trees of four": branching(1, 2, roots=2),
    "coupled": branching(0, 2, branch=4, coupling=NoiseCoupling(kind="shared", strength=2.0)),
    "ode between": TreePlan(
        1, (ODE, Step(branch=3, noise=True, train=True), ODE, NOISY, ODE, ODE), same_noise=True
    ),
    "comb": COMB,
}


def test_what_is_counted_is_what_the_plan_said():
    for plan in PLANS.values():
        field = Counting()
        tree, counts = grown(plan, prompts=1, field=field), count(plan)
        nodes = tree.x.shape[0] * tree.x.shape[1]
        assert (field.rows, tree.forwards) == (counts.forwards, counts.forwards)
        assert nodes == counts.nodes and nodes - len(tree) == counts.edges
        assert len(tree.leaves()) == counts.leaves
        assert len(tree) * len(tree.edge) == counts.trained_edges
        assert field.calls <= T  # one for each level


def test_without_branches_it_is_the_plain_sampler_bit_for_bit():
    for kernel in ["flow_sde", "dance_sde", "cps"]:
        for plan in (chains(), TreePlan(3, (ODE,) * T)):
            numbers = schedule(T, KERNELS[kernel])
            tree = grown(plan, numbers)
            noise, prompt = named_noise(list(range(6))), torch.tensor([0, 0, 0, 1, 1, 1])
            noises = {i: noise((), i, "step") for i, step in enumerate(plan.steps) if step.noise}
            x0 = chain(noise((), 0, "init"), prompt, numbers, noises)
            assert torch.equal(tree.leaves(), x0)
            assert tree.mean_old.shape == (6, len(noises), D)


def test_replaying_one_leaf_with_its_recorded_noise_is_exact():
    for coupling in [
        NoiseCoupling(),
        NoiseCoupling(kind="shared", strength=1.5),
        NoiseCoupling(kind="simplex"),
    ]:
        tree = grown(branching(0, 2, branch=2, coupling=coupling))
        noise, noises, path = named_noise([0, 1]), {}, ()
        for i in range(T - 1):
            noises[i] = noise(path, i, "step")
            if i in (0, 2):
                z = torch.stack([noise((*path, b), i, "step") for b in range(2)], 1)
                shared = partial(noise, path, i, "shared")
                noises[i] = coupled(z, coupling.kind, coupling.strength, shared)[:, 1]
                path = (*path, 1)
        x0 = chain(noise((), 0, "init"), tree.prompt, schedule(T), noises)
        assert torch.equal(tree.x[:, tree.leaf[-1]], x0)


def test_the_density_of_a_step_is_that_of_its_mean_and_std():
    for plan in PLANS.values():
        tree = grown(plan)
        numbers = schedule(T)
        for node in range(1, len(tree.parent)):
            if node not in tree.noisy:
                assert bool((tree.log_prob[:, node] == 0).all()) and tree.g[node] == 0
                continue
            before = int(tree.parent[node])
            i, j = int(tree.step[before]), int(tree.step[node])
            x, s, s_next = tree.x[:, before], numbers.sigmas[i], numbers.sigmas[j]
            v = velocity(x, s, tree.prompt)
            mean, std = numbers.kernel.step(x, v, s, s_next, tree.g[node])
            normal = torch.distributions.Normal(mean, std[:, None])
            expected = normal.log_prob(tree.x[:, node]).mean(1)
            torch.testing.assert_close(tree.log_prob[:, node], expected, rtol=1e-4, atol=1e-4)


@given(st.data(), plans())
def test_trees_that_stopped_go_on_as_if_they_never_had(data, plan):
    total = len(plan.steps)
    stop = data.draw(st.integers(1, total - 1))
    steps = plan.steps[:stop] + (ODE,) * (total - stop)
    stopped = replace(plan, steps=steps, fans=(), stop_at=stop, continuation=plan)
    assume(plan.goes_on_from(stopped))
    field, whole = Counting(), grown(plan)
    early = grown(stopped)
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(early) - 1), min_size=1))))
    noise = named_noise(rows.tolist())
    tree = sample_tree(field, early.take(rows), early.prompt[rows], plan, schedule(total), noise)
    for name, expected in whole.take(rows).by_tree.items():
        assert torch.equal(getattr(tree, name), expected), name
    assert torch.equal(tree.g, whole.g) and tree.velocity is None
    # A velocity where it stopped was computed for the estimated image.
    assert tree.forwards == field.rows == len(rows) * sum(continued_widths(stopped))


def test_trees_go_on_only_from_the_first_steps_of_their_own_plan():
    stopped = TreePlan(2, (ODE,) * T, stop_at=2)
    assert replace(COMB, fans=COMB.fans[3:]).goes_on_from(stopped)
    assert not COMB.goes_on_from(stopped)  # fans begin before
    assert not chains().goes_on_from(stopped)  # other steps
    assert not COMB.goes_on_from(COMB)  # nothing stops


def test_a_merged_first_step_has_the_std_of_a_single_one():
    """At sigma = 1 Flow-SDE's std is its level, however far the step goes."""
    for level in [0.5, 1.0]:
        lengths = (1, 2, 3)
        plan = TreePlan(1, (ODE,) * T, fans=tuple(Fan(step=0, width=1, length=n) for n in lengths))
        numbers = schedule(T, level=level)
        tree = grown(plan, numbers)
        sigma = numbers.sigmas[0]
        stds = [
            (tree.g[node] * (sigma - numbers.sigmas[tree.step[node]]).sqrt()).item()
            for node in tree.edge
        ]
        assert stds == pytest.approx([level] * 3, rel=1e-6)

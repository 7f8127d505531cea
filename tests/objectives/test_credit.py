import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_rollout import rollout_of

from flowrl.functional.sde import KERNELS
from flowrl.objectives.tree_credit import (
    TreeCredit,
    keep_b2_pairs,
    keep_extreme,
    keep_max_variance,
    keep_parent_top1,
)
from flowrl.sampling.sampler import Schedule, sample_tree
from flowrl.scoring.combine import combine_gdpo
from flowrl.trajectory import Conditioning, Rollout
from flowrl.trees.plan import Fan, Step, TreePlan

ODE, NOISY = Step(), Step(noise=True, train=True)
SPLIT = Step(branch=2, noise=True, train=True)
CHAINS = TreePlan(4, (NOISY, NOISY, ODE))
TREE = TreePlan(1, (SPLIT, SPLIT, NOISY, ODE))  # edges: 2 at step 0, 4 at step 1, 4 at step 2
COMB = TreePlan(2, (ODE,) * 4, fans=(Fan(step=0, width=2, strides=(1, 2)), Fan(step=2, width=2)))


def rollout(plan: TreePlan, reward: list[float], prompts: int = 1, scores=None) -> Rollout:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.arange(prompts).repeat_interleave(plan.roots)

    def noise(*_):
        return torch.randn(len(prompt), 3, generator=generator)

    steps = len(plan.steps)
    schedule = Schedule(
        sigmas=torch.linspace(1, 0, steps + 1), kernel=KERNELS["flow_sde"], noise_level=0.5
    )
    tree = sample_tree(lambda x, sigma, p: 0.5 * x, noise(), prompt, plan, schedule, noise)
    cond = Conditioning(tensors={"a": torch.zeros(prompts, 1)})
    return rollout_of(tree, torch.tensor(reward), cond, prompts=("p",) * prompts, scores=scores)


def z(values: list[float], ddof: int = 0, floor: float = 1e-4) -> Tensor:
    rows = torch.tensor(values).double()
    return ((rows - rows.mean()) / (rows.std(correction=ddof) + floor)).float()


REWARD = [0.1, 0.5, 0.9, 0.3]
SCOPES, EDGES = ("leaf", "prompt", "depth", "sibling", "joint"), ("node", "sibling", "path")


def test_chains_get_flow_grpos_advantage_at_every_step():
    advantage, keep = TreeCredit()(rollout(CHAINS, REWARD))
    torch.testing.assert_close(advantage, z(REWARD)[:, None].expand(4, 2))
    assert bool(keep.all())


def test_a_tree_gives_an_edge_the_mean_of_the_images_below_it():
    advantage, _ = TreeCredit(scope="leaf")(rollout(TREE, REWARD))
    a = z(REWARD)
    expected = torch.cat([torch.stack([a[:2].mean(), a[2:].mean()]), a, a])
    torch.testing.assert_close(advantage[0], expected)


def test_branch_grpo_compares_the_nodes_of_one_depth():
    advantage, _ = TreeCredit(scope="depth", ddof=1, floor=1e-8)(rollout(TREE, REWARD))
    first = z([0.3, 0.6], ddof=1, floor=1e-8)
    own = z(REWARD, ddof=1, floor=1e-8)
    torch.testing.assert_close(advantage[0], torch.cat([first, own, own]))
    assert advantage[0, :2].abs().tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_siblings_are_told_what_they_gained_over_their_parent():
    credit = TreeCredit(edges="sibling", scope="leaf", scale="none")
    advantage, _ = credit(rollout(TREE, REWARD))
    gains = advantage[0]
    assert gains[:2].tolist() == pytest.approx([0.3 - 0.45, 0.6 - 0.45])
    assert gains[2:6].tolist() == pytest.approx([-0.2, 0.2, 0.3, -0.3])
    assert gains[6:].tolist() == [0.0] * 4  # nothing was decided after the last split
    assert (gains[0] + gains[2] + gains[6]).item() == pytest.approx(0.1 - 0.45)


def test_leaves_as_trajectories_of_their_own_weigh_a_shared_step_by_their_number():
    advantage, _ = TreeCredit(edges="path")(rollout(TREE, REWARD))
    a = z(REWARD)
    torch.testing.assert_close(advantage[0, :2], torch.stack([a[:2].sum(), a[2:].sum()]))
    torch.testing.assert_close(advantage[0, 2:], a.repeat(2))


def test_fans_are_compared_with_their_own_and_strides_are_summed():
    r = rollout(COMB, [0.0, 1.0, 0.2, 0.8, 0.5, 0.6, 0.3, 0.1, 0.9, 0.4, 0.7, 0.2])
    by_class = r.reward.view(2, 12 // 2)
    order = r.tree.move[r.tree.leaf]
    assert len(order.unique()) == 3  # a class for each fan and stride
    advantage, _ = TreeCredit(edges="fan", scope="leaf")(r)
    below = {
        name: [i for i, c in enumerate(order.tolist()) if c == name] for name in set(order.tolist())
    }
    for tree in range(2):
        a = torch.zeros(6)
        for rows in below.values():
            a[rows] = z(by_class[tree, rows].tolist())
        for column, edge in enumerate(r.tree.edge.tolist()):
            leaves = [i for i, leaf in enumerate(r.tree.leaf.tolist()) if _is_below(r, leaf, edge)]
            assert advantage[tree, column].item() == pytest.approx(a[leaves].sum().item(), abs=1e-5)
    together, _ = TreeCredit(edges="fan", scope="prompt")(r)
    assert not torch.allclose(together, advantage)


def _is_below(r: Rollout, node: int, edge: int) -> bool:
    while node > 0:
        if node == edge:
            return True
        node = int(r.tree.parent[node])
    return False


def test_mc_grpo_is_a_median_and_an_absolute_deviation():
    """2601.22582, five images: the pivot gets exactly 0 and teaches nothing."""
    values = [0.1, 0.5, 0.9, 0.3, 0.7]
    plan = TreePlan(5, (NOISY, NOISY, ODE))
    advantage, _ = TreeCredit(center="median", scale="mad", floor=1e-3)(rollout(plan, values))
    expected = [(v - 0.5) / (0.2 + 1e-3) for v in values]
    assert advantage[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert advantage[1, 0] == 0 and int((advantage[:, 0] != 0).sum()) == 4


def test_gdpo_does_not_let_a_reward_with_a_larger_unit_win():
    values = torch.tensor([[0.1, 300.0], [0.5, 100.0], [0.9, 200.0], [0.3, 400.0]])
    credit = TreeCredit(rewards="gdpo")
    first, _ = credit(rollout(CHAINS, [0.0] * 4, scores=values))
    second, _ = credit(rollout(CHAINS, [0.0] * 4, scores=values * torch.tensor([1.0, 0.01])))
    # The published divisor, std + 1e-4, is felt where the deviation is small: here 0.3 and 1.1.
    torch.testing.assert_close(first, second, rtol=4e-4, atol=0)
    each = [z(values[:, k].tolist(), floor=1e-4) for k in range(2)]
    total = each[0] + each[1]
    expected = total / (total.double().std(correction=0).float() + 1e-4)
    torch.testing.assert_close(first[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_a_reward_of_weight_0_takes_no_part_in_gdpo():
    values = torch.tensor([[0.1, 3.0], [0.5, 1.0], [0.9, 2.0], [0.3, 4.0]])
    whole = rollout(CHAINS, [0.0] * 4, scores=values)
    alone = TreeCredit(rewards="gdpo")(replace(whole, weights=torch.tensor([1.0, 0.0])))[0]
    torch.testing.assert_close(alone, TreeCredit(rewards="gdpo")(rollout(CHAINS, REWARD))[0])


def test_a_tree_fuses_gdpos_sums_and_a_failed_component_counts_0():
    nan = math.nan
    values = torch.tensor([[0.1, 3.0], [0.5, nan], [nan, nan], [0.3, 4.0]])
    r = rollout(TREE, [0.0, nan, nan, 0.0], scores=values)
    worth = combine_gdpo(values, r.weights, r.group, r.applicable)
    assert worth.isnan().tolist() == [False, False, True, False]
    scale = worth[[0, 1, 3]].std(correction=0) + 1e-4
    a = (worth / scale).nan_to_num().float()
    advantage, _ = TreeCredit(rewards="gdpo")(r)
    expected = torch.cat([torch.stack([a[:2].mean(), a[3]]), a, a])
    torch.testing.assert_close(advantage[0], expected)
    assert advantage[0, [4, 8]].tolist() == [0, 0]  # the leaf without any score


def test_a_prompt_with_one_score_teaches_exactly_nothing():
    nan = math.nan
    reward = [nan] * 5 + [0.7, nan, nan, 0.1, 0.9, 0.4, 0.2, 0.3, 0.6, 0.5, 0.8]
    r = rollout(replace(TREE, roots=2), reward, 2)
    for scope, edges, rewards in itertools.product(SCOPES, EDGES, ("sum", "gdpo")):
        advantage, _ = TreeCredit(scope=scope, edges=edges, rewards=rewards)(r)
        assert bool((advantage[:2] == 0).all()) and bool(advantage.isfinite().all())
        # Leaves of this plan have no siblings: compared with them, no leaf credits its path.
        assert bool((advantage[2:] != 0).any()) == ((scope, edges) != ("sibling", "path"))


def test_weighing_by_probability_needs_the_densities_and_vanishes_without_them():
    for fusion in ["path", "local"]:
        r = rollout(TREE, REWARD)
        uniform, _ = TreeCredit()(r)
        weighed, _ = TreeCredit(fusion=fusion)(r)
        assert not torch.allclose(uniform, weighed)
        flat, _ = TreeCredit(fusion=fusion)(replace(r, log_prob=torch.zeros_like(r.log_prob)))
        torch.testing.assert_close(flat, uniform)
        none, _ = TreeCredit(fusion=fusion, path_coef=0.0)(r)
        torch.testing.assert_close(none, uniform)


PRUNINGS = {
    "parent_top1": (keep_parent_top1, [0, 1, 1, 0]),
    "extreme": (lambda leaves: keep_extreme(leaves, 1), [1, 0, 1, 0]),
    "max_variance": (lambda leaves: keep_max_variance(leaves, 3), [1, 0, 1, 1]),
    "b2_pairs": (lambda leaves: keep_b2_pairs(leaves, 0.5), [1, 0, 1, 0]),
}


def test_width_pruning_drops_edges_and_changes_no_advantage():
    for keep, leaves in PRUNINGS.values():
        reward = (
            [0.1, 0.5, 0.9, 0.3] if keep is not PRUNINGS["b2_pairs"][0] else [0.0, 0.5, 1.0, 0.5]
        )
        r = rollout(TREE, reward)
        whole, everything = TreeCredit()(r)
        pruned, kept = TreeCredit(keep=keep)(r)
        assert torch.equal(whole, pruned) and bool(everything.all())
        first = [bool(leaves[0] or leaves[1]), bool(leaves[2] or leaves[3])]
        assert kept[0].tolist() == first + [bool(x) for x in leaves * 2]


def test_the_extremes_of_a_prompt_are_sought_among_all_its_trees():
    plan, reward = replace(CHAINS, roots=4), [0.1, 0.5, 0.9, 0.3, 0.2, 0.8, 0.4, 0.6]
    _, kept = TreeCredit(keep=lambda leaves: keep_extreme(leaves, 1))(
        rollout(plan, reward, prompts=2)
    )
    assert kept[:, 0].tolist() == [True, False, True, False, True, True, False, False]


def test_missing_images_count_nowhere():
    advantage, _ = TreeCredit()(rollout(CHAINS, [0.1, math.nan, 0.9, 0.3]))
    own = z([0.1, 0.9, 0.3])
    torch.testing.assert_close(advantage[[0, 2, 3], 0], own)
    assert advantage[1].tolist() == [0, 0]
    tree, _ = TreeCredit()(rollout(TREE, [0.1, math.nan, 0.9, 0.3]))
    torch.testing.assert_close(tree[0, 0], own[0])  # the mean of what is there
    assert bool(tree.isfinite().all())


def test_a_process_credits_its_trees_as_one_that_holds_all():
    for scope in ["leaf", "prompt", "depth", "sibling", "joint"]:
        for edges in ["node", "sibling", "path"]:
            plan = replace(TREE, roots=2)
            generator = torch.Generator().manual_seed(1)
            reward = torch.rand(16, generator=generator).tolist()
            whole = rollout(plan, reward, prompts=2)
            credit = TreeCredit(scope=scope, edges=edges)
            advantage, keep = credit(whole)
            own = torch.tensor([1, 2])  # one tree of each prompt
            t = whole.tree
            part = replace(t, x=t.x[own], prompt=t.prompt[own], mean_old=t.mean_old[own])
            share, kept = credit(replace(whole, tree=part, trees=own))
            assert torch.equal(share, advantage[own]) and torch.equal(kept, keep[own])


def test_advantages_are_bounded_last():
    advantage, _ = TreeCredit(clip=0.5)(rollout(CHAINS, REWARD))
    torch.testing.assert_close(advantage[:, 0], z(REWARD).clamp(-0.5, 0.5))

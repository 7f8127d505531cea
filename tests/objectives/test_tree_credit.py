"""Credit of trees: values of nodes, what they are compared with, edges, selected images."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from grown import LOPSIDED, assert_exact_with_nan, edge_log_probs, fused, rewarded, trees
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from toy_rollout import rollout_of, sampled

from flowrl.config.objectives import AdvantageOptions, CreditOptions
from flowrl.objectives.advantage import image_advantages, z_scores
from flowrl.objectives.tree_credit import (
    Leaves,
    credit_edges,
    edges_above,
    fuse_local,
    fuse_path,
    keep_b2_pairs,
    keep_extreme,
    keep_parent_top1,
    last_split,
    population,
    tree_credit,
)
from flowrl.trajectory import Conditioning, Rollout, leaves_below
from flowrl.trees.plan import Fan, Step, TreePlan

nan = math.nan
ODE, NOISY = Step(), Step(noise=True, train=True)
SPLIT = Step(branch=2, noise=True, train=True)
CHAINS = TreePlan(4, (NOISY, NOISY, ODE))
TREE = TreePlan(1, (SPLIT, SPLIT, NOISY, ODE))  # edges: 2 at step 0, 4 at step 1, 4 at step 2
COMB = TreePlan(2, (ODE,) * 4, fans=(Fan(step=0, width=2, strides=(1, 2)), Fan(step=2, width=2)))
REWARD = [0.1, 0.5, 0.9, 0.3]
SCOPES, EDGES = ("leaf", "prompt", "depth", "sibling", "joint"), ("node", "sibling", "path")


def rollout(plan: TreePlan, reward: list[float], prompts: int = 1, scores=None) -> Rollout:
    tree = sampled(lambda x, sigma, p: 0.5 * x, plan, prompts)
    cond = Conditioning(tensors={"a": torch.zeros(prompts, 1)})
    return rollout_of(tree, torch.tensor(reward), cond, prompts=("p",) * prompts, scores=scores)


def credit(r: Rollout, **options) -> Tensor:
    return tree_credit(r, CreditOptions(**options))[0]


def z(values: list[float]) -> Tensor:
    rows = torch.tensor(values).double()
    return ((rows - rows.mean()) / (rows.std(correction=0) + 1e-4)).float()


def test_a_tracker_and_emphasis_give_nodes_what_they_give_images():
    options = {"center": "tracker", "emphasis": 1.0}
    for plan, edge in ((CHAINS, 0), (TREE, slice(6, 10))):  # of the leaves' own edges
        r = rollout(plan, [*REWARD, 0.2, 0.2, 0.8, 0.7], prompts=2)
        expected = torch.tensor([0.1, 0.9]).double().repeat_interleave(4)
        r = replace(r, expected_reward=expected, expected_failures=1 - expected)
        of_image, _ = image_advantages(r, AdvantageOptions(**options))
        assert_close(credit(r, **options)[:, edge].flatten(), of_image)


# --- The options, on rollouts -------------------------------------------------------------------


def test_a_tree_gives_an_edge_the_mean_of_the_images_below_or_their_sum():
    r, a = rollout(TREE, REWARD), z(REWARD)
    halves = torch.stack([a[:2].mean(), a[2:].mean()])
    torch.testing.assert_close(credit(r, scope="leaf")[0], torch.cat([halves, a, a]))
    torch.testing.assert_close(credit(r, edges="path")[0], torch.cat([2 * halves, a, a]))


def test_siblings_get_the_gain_over_their_parent():
    gains = credit(rollout(TREE, REWARD), edges="sibling", scope="leaf", scale="none")[0]
    assert gains[:2].tolist() == pytest.approx([0.3 - 0.45, 0.6 - 0.45])
    assert gains[2:6].tolist() == pytest.approx([-0.2, 0.2, 0.3, -0.3])
    assert gains[6:].tolist() == [0.0] * 4  # nothing was decided after the last split


def test_fans_are_compared_with_their_own_and_strides_are_summed():
    r = rollout(COMB, [0.0, 1.0, 0.2, 0.8, 0.5, 0.6, 0.3, 0.1, 0.9, 0.4, 0.7, 0.2])
    order = r.tree.move[r.tree.leaf].tolist()
    assert len(set(order)) == 3  # a class for each fan and stride
    below = leaves_below(r.tree.parent, r.tree.leaf)
    advantage = credit(r, edges="fan", scope="leaf")
    for tree in range(2):
        a = torch.zeros(6)
        for name in set(order):
            rows = [i for i, c in enumerate(order) if c == name]
            a[rows] = z(r.reward.view(2, 6)[tree, rows].tolist())
        for column, edge in enumerate(r.tree.edge.tolist()):
            expected = a[below[edge]].sum().item()
            assert advantage[tree, column].item() == pytest.approx(expected, abs=1e-5)
    assert not torch.allclose(credit(r, edges="fan", scope="prompt"), advantage)


def test_with_gdpo_a_failed_score_of_a_leaf_counts_0():
    values = torch.tensor([[0.1, 3.0], [0.5, nan], [nan, nan], [0.3, 4.0]])
    partial = credit(rollout(TREE, [0.0, nan, nan, 0.0], scores=values), rewards="gdpo")
    assert partial[0, [4, 8]].tolist() == [0, 0]  # the leaf without any score
    assert bool((partial[0, [3, 7]] != 0).all())  # the leaf with one of two


def test_a_prompt_with_one_score_gets_exactly_nothing_and_missing_images_count_nowhere():
    reward = [nan] * 5 + [0.7, nan, nan, 0.1, 0.9, 0.4, 0.2, 0.3, 0.6, 0.5, 0.8]
    r = rollout(replace(TREE, roots=2), reward, 2)
    for scope, edges in itertools.product(SCOPES, EDGES):
        advantage = credit(r, scope=scope, edges=edges)
        assert bool((advantage[:2] == 0).all()) and bool(advantage.isfinite().all())
    advantage = credit(rollout(CHAINS, [0.1, nan, 0.9, 0.3]))
    torch.testing.assert_close(advantage[[0, 2, 3], 0], z([0.1, 0.9, 0.3]))
    assert advantage[1].tolist() == [0, 0]


def test_selection_drops_edges_and_changes_no_advantage():
    for keep, reward, leaves in [
        ("parent_top1", REWARD, [0, 1, 1, 0]),
        ("b2_pairs", [0.0, 0.5, 1.0, 0.5], [1, 0, 1, 0]),
        ("extreme", REWARD, [1, 1, 1, 1]),
    ]:
        r = rollout(TREE, reward)
        advantage, selected = tree_credit(r, CreditOptions(keep=keep))
        assert torch.equal(advantage, credit(r))
        first = [bool(leaves[0] or leaves[1]), bool(leaves[2] or leaves[3])]
        assert selected[0].tolist() == first + [bool(x) for x in leaves * 2]
    chains = rollout(replace(CHAINS, roots=5), [0.1, 0.5, 0.9, 0.3, 0.4] * 2, prompts=2)
    _, selected = tree_credit(chains, CreditOptions(keep="extreme"))
    assert selected[:, 0].tolist() == [True, True, True, True, False] * 2


def test_a_process_credits_all_trees_as_one_that_holds_them():
    generator, local = torch.Generator().manual_seed(1), torch.tensor([1, 2])
    plan = replace(TREE, roots=2)
    whole = rollout(plan, torch.rand(16, generator=generator).tolist(), prompts=2)
    t = whole.tree
    part = replace(t, x=t.x[local], prompt=t.prompt[local], mean_old=t.mean_old[local])
    for scope, edges in itertools.product(SCOPES, EDGES):
        options = {"scope": scope, "edges": edges}
        share = credit(replace(whole, tree=part, trees=local), **options)
        assert torch.equal(share, credit(whole, **options))


# --- The parts, on random trees -----------------------------------------------------------------


@given(case=rewarded(), seed=st.integers(0, 99))
def test_values_are_means_weighted_by_the_probability_of_the_way(case, seed):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward), seed)
    uniform, path = (
        fuse_path(tree.below, reward, valid, weight)
        for weight in (torch.zeros_like(log_prob), log_prob)
    )
    for row, node in itertools.product(range(len(reward)), range(len(tree.parent))):
        weights, rewards = [], []
        for column, leaf in enumerate(tree.leaf.tolist()):
            way = tree.path(leaf)
            if node in way and valid[row, column]:
                weights.append(float(log_prob[row, way[way.index(node) + 1 :]].sum()))
                rewards.append(float(reward[row, column]))
        weight = torch.tensor(weights, dtype=torch.float64).softmax(0)
        mean = torch.tensor(rewards, dtype=torch.float64)
        expected = (weight * mean).sum() if rewards else torch.tensor(nan).double()
        assert_exact_with_nan(path[row, node], expected, 1e-9)
        assert_exact_with_nan(uniform[row, node], mean.mean(), 1e-9)


@given(case=rewarded(), seed=st.integers(0, 99), garbage=st.sampled_from([nan, math.inf, 1e30]))
def test_local_values_weigh_children_and_nothing_of_an_invalid_reward_leaks(case, seed, garbage):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward), seed)
    value = fuse_local(tree.parent, tree.leaf, reward, valid, log_prob)
    assert_exact_with_nan(value[:, tree.leaf], reward)
    for row, node in itertools.product(range(len(reward)), tree.parent.unique().tolist()):
        alive = [c for c in tree.children(node) if not value[row, c].isnan()] if node >= 0 else []
        if alive:
            expected = (log_prob[row, alive].softmax(0) * value[row, alive]).sum()
            assert_exact_with_nan(value[row, node], expected)
    clean = fused(tree, torch.where(valid, reward, 0.0), valid, log_prob)
    dirty = fused(tree, torch.where(valid, reward, garbage), valid, log_prob)
    for kind, values in clean.items():
        assert torch.equal(values.nan_to_num(9.0), dirty[kind].nan_to_num(9.0))
        # A lone child has its parent's value to the last bit.
        for node in range(len(tree.parent)):
            if len(tree.children(node)) == 1:
                (child,) = tree.children(node)
                assert torch.equal(values[:, node].nan_to_num(9), values[:, child].nan_to_num(9))


@given(case=rewarded(all_valid=True), seed=st.integers(0, 99))
def test_sibling_credit_telescopes_along_a_path_and_path_credit_sums_leaves(case, seed):
    tree, reward, valid = case
    everything = torch.ones(len(reward), len(tree.parent), dtype=torch.bool)
    shape = {"parent": tree.parent, "leaf": tree.leaf, "below": tree.below}
    value = fuse_path(tree.below, reward, valid, edge_log_probs(tree, len(reward), seed))
    gains = credit_edges(value, everything, "sibling", **shape)
    for column, leaf in enumerate(tree.leaf.tolist()):
        along = gains[:, tree.path(leaf)].sum(1)
        assert_exact_with_nan(along, reward[:, column] - value[:, 0], 1e-9)
    advantage = torch.zeros_like(value)
    advantage[:, tree.leaf] = reward
    for edges in ("path", "fan"):
        expected = torch.zeros_like(advantage)
        for column, leaf in enumerate(tree.leaf.tolist()):
            expected[:, tree.path(leaf)[1:]] += reward[:, [column]]
        assert_exact_with_nan(credit_edges(advantage, everything, edges, **shape), expected)
    none = credit_edges(value, ~everything, "node", **shape)
    assert not none.any()


def test_a_node_is_compared_with_the_nodes_of_its_scope():
    tree, group = LOPSIDED, torch.tensor([7, 3, 7, 7])
    nodes, rows = range(len(tree.parent)), range(4)
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    equal = torch.zeros(4, len(tree.parent))
    value = fuse_path(tree.below, reward, torch.ones(4, 4).bool(), equal)
    noisy = torch.arange(len(tree.parent)) % 3 == 0
    for scope in SCOPES:
        key, counted = population(scope, group, tree.parent, tree.step, noisy)
        mask = counted.expand_as(value).flatten()
        options = AdvantageOptions(scale="std")
        found = z_scores(value.flatten(), key.flatten(), options, mask).view_as(value)
        for row, node in itertools.product(rows, nodes):
            prompt = [r for r in rows if group[r] == group[row]]
            pairs = {
                "leaf": [(row, n) for n in tree.leaf.tolist()],
                "prompt": [(r, n) for r in prompt for n in tree.leaf.tolist()],
                "depth": [(row, n) for n in nodes if tree.step[n] == tree.step[node]],
                "sibling": [(row, n) for n in nodes if tree.parent[n] == tree.parent[node]],
                "joint": [(r, n) for r in prompt for n in nodes if n % 3 == 0],
            }[scope]
            members = np.array([value[p].item() for p in pairs])
            expected = 0.0
            if len(members) > 1 and np.ptp(members) > 1e-9:
                expected = (value[row, node].item() - members.mean()) / (members.std() + 1e-4)
            assert found[row, node].item() == pytest.approx(expected, abs=1e-9)


def leaves(score, valid, splits=None) -> Leaves:
    """Trees (N, l) whose rewards are their advantages, each of a prompt of its own."""
    return Leaves(
        reward=score, valid=valid, advantage=score, group=torch.arange(len(score)),
        last_split=torch.zeros(score.shape[1]).long() if splits is None else splits,
    )  # fmt: skip


@given(case=rewarded())
def test_selections_are_those_of_their_papers(case):
    tree, score, valid = case
    splits = last_split(tree.parent, tree.leaf)
    top, pairs = (keep(leaves(score, valid, splits)) for keep in (keep_parent_top1, keep_b2_pairs))
    extreme = keep_extreme(leaves(score, valid))
    for row in range(len(score)):

        def ranked(rows, row=row):
            alive = (rows & valid[row]).nonzero().flatten().tolist()
            return sorted(alive, key=lambda leaf: (-score[row, leaf].item(), leaf))  # noqa: B023

        whole = ranked(torch.ones_like(valid[row]))
        assert set(extreme[row].nonzero().flatten().tolist()) == {*whole[:2], *whole[-2:]}
        for name in splits.unique():
            order, inside = ranked(splits == name), splits == name
            assert (top[row] & inside).nonzero().flatten().tolist() == order[:1]
            expected = {i for i in order[:1] if score[row, i] >= 0.5}
            expected |= {i for i in order[-1:] if score[row, i] < -0.5}
            assert set((pairs[row] & inside).nonzero().flatten().tolist()) == expected
        above = {n for leaf in tree.leaf[valid[row]].tolist() for n in tree.path(leaf)}
        assert set(edges_above(tree.below, valid)[row].nonzero().flatten().tolist()) == above


@given(tree=trees())
def test_a_leaf_is_below_itself_and_all_nodes_above_it(tree):
    below, splits = leaves_below(tree.parent, tree.leaf), last_split(tree.parent, tree.leaf)
    for column, leaf in enumerate(tree.leaf.tolist()):
        path = tree.path(leaf)
        assert below[:, column].nonzero().flatten().tolist() == sorted(path)
        above = [n for n in path[:-1] if len(tree.children(n)) > 1]
        assert splits[column] == (above[-1] if above else 0)

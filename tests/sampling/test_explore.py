"""Two stages: which candidates are kept, and what becomes of them in a rollout."""

import math
from itertools import combinations
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import disturb

import flowrl.sampling.rollout
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import Timer, group_request
from flowrl.sampling.two_stage import SelectRule, select_candidates
from flowrl.scoring import combine

# --- which are kept ------------------------------------------------------------------------------


SCORES = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf]) | st.floats(-3, 3, width=32),
    min_size=1,
    max_size=40,
)


def chosen(proxy, keep, mode="best_worst", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return select_candidates(torch.tensor(proxy), keep, mode, generator).tolist()


def test_the_best_and_the_worst_are_kept_one_more_of_the_worst_where_the_number_is_odd():
    proxy = [0.3, 0.9, 0.1, 0.5, 0.7, 0.2]
    assert chosen(proxy, 4) == [1, 2, 4, 5]
    assert chosen(proxy, 3) == [1, 2, 5]
    assert chosen(proxy, 1) == [2]


def test_of_equal_proxies_the_first_count_as_the_better_ones():
    assert chosen([0.5] * 6, 4) == [0, 1, 4, 5]
    assert chosen([0.5] * 400, 2) == [0, 399]
    assert chosen([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], 2) == [1, 5]


def test_those_furthest_from_the_mean_are_kept():
    assert chosen([0.0, 0.4, 0.5, 0.6, 3.0], 2, "mean_deviation") == [0, 4]
    assert chosen([0.0, 0.1, 0.1, 4.0, 4.2], 3, "mean_deviation") == [0, 3, 4]


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8), st.integers(1, 8))
def test_the_variance_of_those_kept_is_the_largest_of_all_choices(proxy, keep):
    keep, scores = min(keep, len(proxy)), torch.tensor(proxy).double()
    best = max(
        scores[list(rows)].var(correction=0) for rows in combinations(range(len(proxy)), keep)
    )
    kept = chosen(proxy, keep, "max_variance")
    torch.testing.assert_close(scores[kept].var(correction=0), best)


def test_extremes_are_kept_with_others_at_random():
    found = {tuple(chosen(list(range(9)), 4, "extremes_random", seed)) for seed in range(40)}
    assert len(found) > 5
    assert all(kept[0] == 0 and kept[-1] == 8 for kept in found)
    assert chosen([0.2, 0.1], 1, "extremes_random") == [0]


def test_a_random_choice_reads_no_proxies():
    assert chosen([0.1, 0.2, 0.3, 0.4], 2, "random") == chosen([4.0, 3.0, 2.0, 1.0], 2, "random")
    assert len({tuple(chosen([0.0] * 6, 3, "random", seed)) for seed in range(200)}) == 20


def test_most_mixed_keeps_the_highest_scores():
    assert chosen([0.1, 0.25, math.nan, 0.2, 0.0], 2, "most_mixed") == [1, 3]


@given(SCORES, st.integers(1, 40), st.sampled_from(get_args(SelectRule)), st.integers(0, 9))
def test_the_kept_are_distinct_ascending_finite_and_as_many_as_can_be(proxy, keep, mode, seed):
    keep = min(keep, len(proxy))
    found = chosen(proxy, keep, mode, seed)
    finite = [i for i, score in enumerate(proxy) if math.isfinite(score)]
    assert found == sorted(set(found))
    assert set(found) <= set(finite)
    assert len(found) == min(keep, len(finite))


# --- in a rollout --------------------------------------------------------------------------------


ODE = {"tree": {"kind": "ode"}}
NFT = {"kind": "nft", "noising": {"count": 2}}
FEW = {"precision": "bf16", "audit": {"every": 0}}
LARGE = {"min_dim": 128}  # layers that are rounded
ROUGH = FEW | {"precision": "nvfp4-emulated", "num_inference_steps": 2}
TREES = [
    ({"kind": "ode"}, NFT),
    ({"kind": "flow_grpo"}, {"kind": "grpo"}),
    ({"kind": "branch_grpo", "branch": 2, "splits": [0]}, {"kind": "grpo"}),
]


def rollout_of(make_learner, explore, objective=NFT, rollout=ODE, **changes):
    learner = make_learner(objective=objective, rollout=rollout | {"explore": explore}, **changes)
    disturb(learner.policy, 0.05)
    return learner.source.collect(0, Timer())


@pytest.fixture
def drawn(monkeypatch):
    found = []
    sample = flowrl.sampling.rollout.sample_request
    monkeypatch.setattr(
        flowrl.sampling.rollout, "sample_request", lambda *a: found.append(sample(*a)) or found[-1]
    )
    return found


def test_when_all_are_kept_the_rollout_is_that_of_one_stage(make_learner):
    for tree, objective in TREES:
        roots = 2 if tree["kind"] == "branch_grpo" else 4
        whole = rollout_of(make_learner, None, objective, {"tree": tree})
        explore = FEW | {"candidates": roots, "num_inference_steps": None}
        staged = rollout_of(make_learner, explore, objective, {"tree": tree})
        for name in ("x", "log_prob", "mean_old", "prompt"):
            assert torch.equal(getattr(staged.tree, name), getattr(whole.tree, name)), name
        for name in ("images", "scores", "reward", "valid", "group", "trees", "log_prob"):
            assert torch.equal(getattr(staged, name), getattr(whole, name)), name
        assert staged.seed == whole.seed and staged.prompts == whole.prompts
        assert whole.explored is None and staged.explored.chosen.tolist() == [[*range(roots)]] * 2


def test_both_stages_start_from_the_same_noise_bit_for_bit(make_learner, drawn):
    explore = ROUGH | {"candidates": 10}
    rollout = rollout_of(make_learner, explore, rollout=ODE | {"batch_size": 7}, pipeline=LARGE)
    chosen = rollout.explored.chosen
    starts = torch.cat([tree.x[:, 0] for tree in drawn])
    candidates, again = starts[:20].view(2, 10, *starts.shape[1:]), starts[20:]
    kept = torch.stack([noise[rows] for noise, rows in zip(candidates, chosen, strict=True)])
    assert torch.equal(again, kept.flatten(0, 1))
    # 20 candidates take their 2 steps, the 8 kept ones the rollout's own 4.
    counts = [(len(tree), len(tree.sigmas) - 1) for tree in drawn]
    assert counts == [(7, 2), (7, 2), (6, 2), (4, 4), (4, 4)]


def test_a_candidate_that_stops_is_scored_by_its_estimated_clean_image(make_learner, drawn):
    explore = FEW | {"candidates": 5, "num_inference_steps": None, "stop_at": 2}
    rollout = rollout_of(make_learner, explore, rollout=ODE | {"batch_size": 10})
    early, whole = drawn[0], drawn[1]
    # A step of Euler from x at sigma to 0 is x - sigma v, whose v the whole chain shows.
    sigmas = whole.sigmas
    rows = rollout.explored.chosen + torch.arange(2)[:, None] * 5
    at, after = whole.x[:, 2].float(), whole.x[:, 3].float()
    v = (after - at) / (sigmas[3] - sigmas[2])
    torch.testing.assert_close(early.leaves()[rows.flatten()].float(), at - sigmas[2] * v)
    assert rollout.explored.forwards == 2 * 5 * 3 and early.step.tolist() == [0, 1, 2, 4]


PROMPTS = [PromptRecord(uid=text, text=text) for text in ("a red star", "a blue ring")]
SPLITS = {"kind": "branch_grpo", "branch": 2, "splits": [0, 1]}


def test_a_candidate_that_stops_has_the_trunk_and_the_noise_of_the_tree_it_becomes(
    make_learner, drawn
):
    for tree, roots in ((SPLITS, 2), ({"kind": "flow_grpo"}, 8), ({"kind": "ode"}, 8)):
        drawn.clear()
        explore = FEW | {"candidates": roots + 1, "num_inference_steps": None, "stop_at": 2}
        options = {"tree": tree, "group_size": 8, "batch_size": 96}
        objective = NFT if tree["kind"] == "ode" else {"kind": "grpo"}
        rollout = rollout_of(make_learner, explore, objective, options)
        early, whole = drawn
        rows = rollout.explored.chosen + torch.arange(2)[:, None] * (roots + 1)
        nodes = (early.step <= 2).nonzero().squeeze(1)
        assert torch.equal(early.step[nodes], whole.step[: len(nodes)])
        torch.testing.assert_close(early.x[rows.flatten()][:, nodes], whole.x[:, nodes])
        # One forward each leads from there to the images that are scored.
        assert len(early.leaf) == int((early.step == 2).sum()) and early.step[-1] == 4


@pytest.mark.parametrize(
    ("tree", "more", "forwards"),
    [  # of 8 images a prompt: after step 2, whose velocities the candidates had
        ({"kind": "ode"}, {}, 8),
        ({"kind": "flow_grpo"}, {}, 8),
        (SPLITS, {}, 8),
        (SPLITS, {"look_ahead": {"threshold": 0.9}}, None),
        ({"kind": "branch_grpo", "branch": 2, "splits": [0, 2]}, {}, 8),
    ],
)
def test_selected_candidates_that_go_on_are_those_of_their_noise_in_fewer_forwards(
    make_learner, drawn, tree, more, forwards
):
    explore = FEW | {"candidates": 12, "num_inference_steps": None, "stop_at": 2}
    options = more | {"tree": tree, "group_size": 8, "num_inference_steps": 5, "batch_size": 1}
    objective = NFT if tree["kind"] == "ode" else {"kind": "grpo"}
    rollouts, trees = [], []
    for precision in ("bf16", "auto"):  # auto samples them again, here by the same network
        drawn.clear()
        rollouts.append(
            rollout_of(make_learner, explore | {"precision": precision}, objective, options)
        )
        trees.append(drawn[24:])
    on, again = rollouts
    assert torch.equal(on.explored.chosen, again.explored.chosen)
    for name in ("x", "log_prob", "mean_old", "g", "step", "parent", "leaf", "prompt"):
        assert torch.equal(getattr(on.tree, name), getattr(again.tree, name)), name
    if again.tree.twin is not None:
        assert torch.equal(on.tree.twin, again.tree.twin)
    for name in ("images", "scores", "group", "trees"):
        assert torch.equal(getattr(on, name), getattr(again, name)), name
    saved = [later.forwards - fewer.forwards for fewer, later in zip(*trees, strict=True)]
    assert (
        on.tree.velocity is None and len(saved) == len(on.trees) and min(saved) >= 3
    )  # of steps 0, 1 and 2
    if forwards is not None:
        assert sum(one.forwards for one in trees[0]) == 2 * forwards * 2


def test_candidates_that_go_on_have_the_exact_network_and_leave_no_pixels(make_learner):
    explore = FEW | {"candidates": 8, "num_inference_steps": None, "stop_at": 2}
    explorer = make_learner(
        objective={"kind": "grpo"}, rollout={"merge_lora": False, "explore": explore}
    ).source.explorer
    request = group_request(PROMPTS, explorer.plan(0), seed=0, iteration=0)
    generator, _ = explorer.preview(0, request)
    assert generator.backbone is explorer.preview.exact.backbone
    samples = generator.sample(request, explorer.plan(0), Timer(), keep=False)
    assert all(
        tree.velocity is not None and images.untyped_storage().nbytes() == 0
        for tree, images in generator.score(samples, Timer()).images
    )


def test_most_mixed_keeps_the_trees_whose_estimated_images_differ_most(make_learner):
    explore = FEW | {"candidates": 6, "num_inference_steps": None, "stop_at": 2}
    explore |= {"select": "most_mixed"}
    rollout = {"tree": SPLITS, "group_size": 8}
    learner = make_learner(objective={"kind": "grpo"}, rollout=rollout | {"explore": explore})
    disturb(learner.policy, 0.05)
    plan, sampler = learner.source.explorer.plan(0), learner.source
    request = sampler.request(0, plan)
    generator, _ = sampler.explorer.preview(0, request)
    leaves = generator.score(generator.sample(request, plan, Timer()), Timer()).reward
    variance = leaves.double().view(2, 6, 4).var(-1, correction=0)
    explored = sampler.collect(0, Timer()).explored
    torch.testing.assert_close(explored.proxy, variance.float())
    assert torch.equal(explored.chosen, variance.topk(2).indices.sort().values)


class Twofold:
    def __init__(self, proxy, calls: int = 1):
        self.proxy, self.calls = proxy, calls

    def __call__(self, images, prompts, metadata):
        bright = images.mean((1, 2, 3))
        self.calls -= 1
        return self.proxy(bright) if self.calls >= 0 else bright


def explorer(make_learner, reward=None, **changes):
    rollout = ODE | {"batch_size": 96, "explore": FEW | {"candidates": 9, "num_inference_steps": 2}}
    changes |= {"rewards": {"twofold": reward}} if reward else {}
    return make_learner(objective=NFT, rollout=rollout, pipeline={"decode_batch": 96}, **changes)


def test_proxies_decide_what_is_sampled_again_and_nothing_else(make_learner):
    def update(proxy):
        learner = explorer(make_learner, Twofold(proxy))
        rollout, _ = learner.iterate(0)
        return rollout, [p.clone() for p in learner.policy.parameters()]

    plain, weights = update(lambda bright: bright)
    cubed, same = update(lambda bright: 100 * bright**3 - 7)
    assert not torch.equal(plain.explored.proxy, cubed.explored.proxy)
    assert torch.equal(plain.explored.chosen, cubed.explored.chosen)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    other, _ = update(lambda bright: (1e4 * bright).sin())  # another order within each prompt
    assert not torch.equal(plain.explored.chosen, other.explored.chosen)


def test_candidates_without_a_score_are_not_ranked_and_are_counted(make_learner, monkeypatch):
    monkeypatch.setattr(combine, "MOST_INVALID", 0.7)

    def patchy(bright):
        bright = bright.clone()
        bright[:5] = math.nan
        bright[6:12] = math.nan
        return bright

    learner = explorer(make_learner, Twofold(patchy))
    rollout, metrics = learner.iterate(0)
    assert metrics["explore/missing"] == pytest.approx(11 / 18)
    # Of the first prompt one of nine has a score: it is kept, and the first of those without.
    assert rollout.explored.chosen[0].tolist() == [0, 1, 2, 5]
    assert min(rollout.explored.chosen[1].tolist()) >= 3
    assert metrics["explore/unranked"] == pytest.approx(3 / 8)
    assert metrics["reward/invalid"] == 0


def watched(images, prompts, metadata):
    SEEN.append(len(images))
    return images.mean((1, 2, 3))


SEEN: list[int] = []


def test_rewards_that_are_only_watched_are_not_asked_about_candidates(make_learner):
    held_out = {"name": f"{__name__}:watched", "held_out": True, "when": "both"}
    learner = explorer(make_learner, specs=[{"name": "brightness"}, held_out])
    learner.iterate(0)
    assert sum(SEEN) == 8


def test_a_candidate_with_several_leaves_is_worth_their_mean(make_learner):
    tree = {"tree": {"kind": "branch_grpo", "branch": 2, "splits": [1]}}
    explore = FEW | {"candidates": 2, "num_inference_steps": None}
    rollout = rollout_of(make_learner, explore, {"kind": "grpo"}, tree)
    leaves = rollout.reward.view(2, 2, 2)
    assert torch.equal(rollout.explored.proxy, leaves.nanmean(-1))


def test_the_first_ratio_of_grpo_is_one_on_what_was_kept(make_learner):
    explore = ROUGH | {"candidates": 8}
    rollout = {"tree": {"kind": "flow_grpo"}, "explore": explore, "merge_lora": False}
    learner = make_learner(objective={"kind": "grpo"}, rollout=rollout, pipeline=LARGE)
    disturb(learner.policy, 0.05)
    _, metrics = learner.iterate(0)
    assert metrics["policy/ratio_error_max"] == 0
    assert metrics["explore/spread_kept"] > metrics["explore/spread"] > 0
    assert metrics["explore/candidates"] == 16 and metrics["explore/forwards"] == 32


def test_what_cannot_be_explored_is_refused(tiny_config):
    one_noise = {"kind": "tree_grpo", "branch": 4, "window": {"kind": "fixed", "size": 1}}
    for explore, other, message in (
        ({"candidates": 3}, {}, "candidates must be at least 4"),
        ({"num_inference_steps": 5}, {}, "explore.num_inference_steps must be 2 to 4"),
        ({"num_inference_steps": 1}, {}, "explore.num_inference_steps must be 2 to 4"),
        ({"num_inference_steps": 2, "stop_at": 1}, {}, "stop_at .*_steps must be null"),
        ({"num_inference_steps": None, "stop_at": 4}, {}, "stop_at must be below 4"),
        ({"num_inference_steps": None, "select": "most_mixed"}, {}, "most_mixed.*flow_grpo"),
        ({"num_inference_steps": 2}, {"tree": {"kind": "dance_grpo"}}, "dance_grpo .*one noise"),
        ({"num_inference_steps": 2}, {"tree": one_noise}, "tree_grpo .*one noise"),
        ({"num_inference_steps": 2}, {"store": "groups"}, "rollout.store"),
    ):
        rollout = {"tree": {"kind": "flow_grpo"}, "explore": explore} | other
        with pytest.raises(UserError, match=message):
            tiny_config(rollout=rollout, objective={"kind": "sft"})

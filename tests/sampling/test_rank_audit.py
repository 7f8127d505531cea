"""Do candidates rank as exact images do? The numbers, and what follows in a run."""

import logging
import math
from dataclasses import asdict

import pytest
import torch
from gaussian_flow import f64
from hypothesis import given
from hypothesis import strategies as st

from flowrl.sampling import rank_audit
from flowrl.sampling.rank_audit import audit_ranks, spearman_rho
from flowrl.sampling.rollout import Timer

NAN, INF = math.nan, math.inf
few = st.integers(0, 4)  # many ties


def scores(prompts=4, candidates=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, candidates, dtype=torch.float64, generator=generator)


# --- numbers -------------------------------------------------------------------------------------


@given(rows=st.lists(st.tuples(few, few), min_size=2, max_size=12))
def test_spearmans_rho_is_the_correlation_of_average_ranks(rows):
    columns = [*zip(*rows, strict=True)]
    ranks = [[sum(v > w for v in c) + c.count(w) / 2 for w in c] for c in columns]
    rho = spearman_rho(*(f64(*column) for column in columns))
    if any(len(set(column)) == 1 for column in columns):
        assert math.isnan(rho)
    else:
        assert rho == pytest.approx(torch.corrcoef(torch.tensor(ranks).double())[0, 1].item())


def test_a_candidate_without_one_score_is_left_out_of_both():
    proxy, true = f64(3, NAN, 1, 2, INF, 9), f64(0.3, 0.9, 0.2, 0.1, 0.0, NAN)
    assert spearman_rho(proxy, true) == spearman_rho(f64(3, 1, 2), f64(0.3, 0.2, 0.1)) != 1
    assert math.isnan(spearman_rho(f64(1, NAN), f64(2, 3)))
    broken, lost = scores(2, 12), scores(2, 12, seed=1)
    broken[0, 3], lost[0, 5], broken[1, 0] = NAN, NAN, INF
    audit = audit_ranks(broken, lost, 4)
    assert audit.missing == 3
    rest = [i for i in range(12) if i not in (3, 5)]
    alone = audit_ranks(broken[:1, rest], lost[:1, rest], 4)
    assert asdict(audit_ranks(broken[:1], lost[:1], 4)) == asdict(alone) | {"missing": 2}


@pytest.mark.parametrize("select", ["best_worst", "mean_deviation", "extremes_random", "random"])
def test_perfect_and_reversed_candidates(select):
    true = scores()
    perfect = audit_ranks(true.exp() if select != "mean_deviation" else 2 * true, true, 24, select)
    assert [perfect.rho, perfect.contrast] == pytest.approx([1, 1])
    reverse = audit_ranks(-true, true, 24, select)
    assert reverse.rho == pytest.approx(-1) and reverse.contrast < 0


def test_means_are_over_the_prompts_that_have_a_rank():
    unrelated = audit_ranks(scores(400), scores(400, seed=1), 24)
    assert unrelated.rho == pytest.approx(0, abs=0.02)
    assert unrelated.contrast == pytest.approx(0, abs=0.05)
    true, proxy = scores(3, 8), scores(3, 8, seed=1)
    proxy[0], true[1] = 0.5, 0.5
    audit, alone = audit_ranks(proxy, true, 4), audit_ranks(proxy[2:], true[2:], 4)
    assert audit.rho == alone.rho and audit.missing == 0
    empty = audit_ranks(torch.full((2, 6), NAN), scores(2, 6), 4)
    assert math.isnan(empty.rho) and math.isnan(empty.contrast) and empty.missing == 12


# --- in a run ------------------------------------------------------------------------------------

EXPLORE = {"candidates": 8, "num_inference_steps": 2, "precision": "nvfp4-emulated"}


@pytest.fixture
def options(tmp_path):
    def make(tree="ode", explore=None, **audit):
        merged = EXPLORE | (explore or {}) | {"audit": {"every": 2} | audit}
        return {
            "objective": {"kind": "nft", "noising": {"count": 2}},
            "rollout": {"tree": {"kind": tree}, "explore": merged},
            "pipeline": {"min_dim": 128},
            "run": {"output_dir": str(tmp_path / "run")},
        }

    return make


def test_audits_come_when_they_are_due_and_change_no_image(
    make_learner, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(rank_audit, "MIN_RHO", -1.0)
    learner = make_learner(**options())
    rollouts = [learner.source.collect(i, Timer()) for i in range(4)]
    assert [bool(rollout.explored.audit) for rollout in rollouts] == [True, False, True, False]
    plain = make_learner(**options(every=0)).source.collect(0, Timer())
    assert plain.explored.audit == {} and torch.equal(plain.tree.x, rollouts[0].tree.x)


@pytest.mark.parametrize(("tree", "named"), [("ode", "precision"), ("flow_grpo", "to null")])
def test_a_low_rho_warns_and_says_what_to_change(
    make_learner, options, tmp_path, caplog, monkeypatch, tree, named
):
    monkeypatch.setattr(rank_audit, "MIN_RHO", 1.0)
    with caplog.at_level(logging.WARNING, "flowrl"):
        rollout = make_learner(**options(tree)).source.collect(0, Timer())
    assert named in caplog.text and rollout.explored.audit["rho"] < 1

"""The report of an audit: what perfect, reversed and unrelated previews give."""

import math
from dataclasses import asdict

import pytest
import torch
from pydantic import TypeAdapter

from flowrl.sampling.rank_audit import AuditReport, audit, spearman_rho

NAN = math.nan
NUMBERS = ("tau", "rho", "overlap_best", "overlap_worst", "retention")


def scores(prompts=4, candidates=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, candidates, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("candidates", "keep"), [(96, 24), (96, 25), (10, 10), (7, 3)])
def test_perfect_previews_agree_fully_and_have_the_ranks_of_the_formulas(candidates, keep):
    true = scores(candidates=candidates)
    report = audit(true.exp(), true, keep)
    best, worst = keep // 2, keep - keep // 2
    for prompt in report.prompts:
        assert [getattr(prompt, name) for name in NUMBERS] == pytest.approx([1] * 5)
        for rank in (prompt.rank_best, prompt.perfect_best):
            assert rank == pytest.approx((best + 1) / 2)
        for rank in (prompt.rank_worst, prompt.perfect_worst):
            assert rank == pytest.approx(candidates - (worst - 1) / 2)
        assert prompt.rank_random == (candidates + 1) / 2 and prompt.pairs == candidates
    assert [report.pooled_tau, report.pooled_rho] == pytest.approx([1, 1])


def test_24_of_96_have_the_ranks_6_5_and_90_5():
    report = audit(scores(), scores(), 24)
    assert report.mean("rank_best") == 6.5 and report.mean("rank_worst") == 90.5
    assert report.mean("rank_random") == 48.5


def test_reversed_previews_disagree_fully():
    true = scores()
    report = audit(-true, true, 24)
    for prompt in report.prompts:
        assert [prompt.tau, prompt.rho, prompt.retention] == pytest.approx([-1, -1, -1])
        assert prompt.overlap_best == prompt.overlap_worst == 0
        assert (prompt.rank_best, prompt.rank_worst) == (90.5, 6.5)


def test_unrelated_previews_choose_ranks_of_half_the_candidates():
    """Standard error of the mean rank of 12 of 96 over 400 prompts: about 0.4."""
    report = audit(scores(400), scores(400, seed=1), 24)
    for name in ("rank_best", "rank_worst"):
        assert report.mean(name) == pytest.approx(48.5, abs=1.6)
    assert report.rho == pytest.approx(0, abs=0.02)
    assert report.mean("overlap_best") == pytest.approx(12 / 96, abs=0.02)
    assert report.mean("retention") == pytest.approx(0, abs=0.05)


def test_prompts_of_different_worth_make_pooled_numbers_better_than_those_within():
    level = torch.tensor([[0.0], [100.0]]).double()
    report = audit(level + scores(2), level + scores(2, seed=1), 24)
    assert report.rho < 0.3 < 0.7 < report.pooled_rho


def test_equal_scores_share_their_rank_so_that_the_best_possible_one_is_worse():
    true = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]])
    prompt = audit(true, true, 4).prompts[0]
    assert (prompt.rank_best, prompt.perfect_best) == (2.5, 2.5)
    assert (prompt.rank_worst, prompt.perfect_worst) == (6.5, 6.5)
    assert prompt.retention == 1 and prompt.rank_random == 4.5


def test_a_prompt_with_equal_previews_has_no_rho_but_its_choice_is_measured():
    true = scores(2, 8)
    proxy = true.clone()
    proxy[1] = 0.5
    report = audit(proxy, true, 4)
    assert report.without_rho == 1 and report.rho == pytest.approx(1)
    blind = report.prompts[1]
    ranked = true[1].argsort(descending=True).argsort() + 1
    assert blind.rank_best == ranked[:2].double().mean()  # by index, as the selection breaks ties
    assert blind.rank_worst == ranked[6:].double().mean()
    assert math.isnan(blind.tau) and math.isnan(blind.rho)


def test_where_all_exact_scores_are_equal_nothing_can_be_found_or_missed():
    true = scores(2, 8)
    true[0] = 0.5
    report = audit(scores(2, 8, seed=1), true, 4)
    empty = report.prompts[0]
    numbers = asdict(empty)
    assert numbers.pop("pairs") == 8 and all(map(math.isnan, numbers.values()))
    assert report.mean("overlap_best") == report.prompts[1].overlap_best


def test_missing_scores_are_left_out_of_both_and_counted():
    true, proxy = scores(2, 12), scores(2, 12, seed=1)
    broken, lost = proxy.clone(), true.clone()
    broken[0, 3], lost[0, 5], lost[0, 3] = NAN, NAN, NAN
    broken[1, 0] = math.inf
    report = audit(broken, lost, 4)
    assert report.missing == 3 and [p.pairs for p in report.prompts] == [10, 11]
    kept = [i for i in range(12) if i not in (3, 5)]
    assert report.prompts[0] == audit(proxy[:1, kept], true[:1, kept], 4).prompts[0]
    both = broken.isfinite() & lost.isfinite()
    assert report.pooled_rho == pytest.approx(spearman_rho(proxy[both], true[both]))


def test_without_any_pair_there_are_no_numbers():
    report = audit(torch.full((2, 6), NAN), scores(2, 6), 4)
    assert math.isnan(report.rho) and math.isnan(report.pooled_rho) and report.missing == 12
    assert report.without_rho == 2 and math.isnan(report.mean("rank_best"))


def test_one_kept_candidate_is_the_worst_and_there_is_no_best():
    prompt = audit(scores(1), scores(1), 1).prompts[0]
    assert math.isnan(prompt.rank_best) and math.isnan(prompt.overlap_best)
    assert prompt.rank_worst == 96 and math.isnan(prompt.retention)


@pytest.mark.parametrize("mode", ["mean_deviation", "extremes_random", "random"])
def test_perfect_previews_choose_what_exact_scores_would_in_every_mode(mode):
    true = scores()
    report = audit(2 * true, true, 24, mode)
    assert report.mean("overlap_best") == report.mean("overlap_worst") == 1
    assert report.mean("retention") == pytest.approx(1)
    assert report.mean("rank_best") == report.mean("perfect_best")


def test_a_random_choice_is_the_same_whatever_the_previews_say():
    true = scores()
    report = audit(-true, true, 24, "random")
    assert report.mean("rank_best") == report.mean("perfect_worst") > 48.5


def test_a_report_survives_being_written_nan_and_all():
    true = scores(3, 8)
    true[0] = 0
    report = audit(scores(3, 8, seed=1), true, 4)
    kind = TypeAdapter(AuditReport)
    text = kind.dump_json(report)
    assert b"NaN" not in text and repr(kind.validate_json(text, strict=True)) == repr(report)


def test_the_summary_has_every_mean_and_what_was_left_out():
    true = scores(2, 8)
    true[0] = 0
    report = audit(scores(2, 8, seed=1), true, 4)
    found = report.summary()
    assert (found["no rho"], found["missing"]) == (1, 0)
    own = report.prompts[1]
    assert [found["rho"], found["tau"], found["retention"]] == [own.rho, own.tau, own.retention]
    assert [found[f"rank {side}"] for side in ("best", "worst")] == [own.rank_best, own.rank_worst]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one of each"):
        audit(scores(2), scores(3), 24)
    with pytest.raises(ValueError, match=r"expected \(prompts, candidates\)"):
        audit(scores()[0], scores()[0], 24)
    with pytest.raises(ValueError, match="97 of 96"):
        audit(scores(), scores(), 97)

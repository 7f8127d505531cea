import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from flowrl.errors import UserError
from flowrl.quantization.backends import Capability, precision_name, resolve
from flowrl.sampling.rank_audit import (
    FILE,
    AuditDecision,
    AuditEvent,
    AuditLog,
    AuditReport,
    audit_ranks,
    decide,
    replay_precision,
    spearman_rho,
)

NAN = math.nan
NUMBERS = ("tau", "rho", "overlap_best", "overlap_worst", "retention")


def scores(prompts=4, candidates=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, candidates, dtype=torch.float64, generator=generator)


def test_perfect_previews_agree_fully_and_have_the_ranks_of_the_formulas():
    for candidates, keep in [(96, 24), (96, 25), (10, 10), (7, 3)]:
        true = scores(candidates=candidates)
        report = audit_ranks(true.exp(), true, keep)
        best, worst = keep // 2, keep - keep // 2
        for prompt in report.prompts:
            assert [getattr(prompt, name) for name in NUMBERS] == pytest.approx([1] * 5)
            for rank in (prompt.rank_best, prompt.perfect_best):
                assert rank == pytest.approx((best + 1) / 2)
            for rank in (prompt.rank_worst, prompt.perfect_worst):
                assert rank == pytest.approx(candidates - (worst - 1) / 2)
            assert prompt.rank_random == (candidates + 1) / 2 and prompt.pairs == candidates
        assert [report.pooled_tau, report.pooled_rho] == pytest.approx([1, 1])


def test_reversed_previews_disagree_fully():
    true = scores()
    report = audit_ranks(-true, true, 24)
    for prompt in report.prompts:
        assert [prompt.tau, prompt.rho, prompt.retention] == pytest.approx([-1, -1, -1])
        assert prompt.overlap_best == prompt.overlap_worst == 0
        assert (prompt.rank_best, prompt.rank_worst) == (90.5, 6.5)


def test_unrelated_previews_choose_ranks_of_half_the_candidates():
    # Standard error of the mean rank of 12 of 96 over 400 prompts: about 0.4.
    report = audit_ranks(scores(400), scores(400, seed=1), 24)
    for name in ("rank_best", "rank_worst"):
        assert report.mean(name) == pytest.approx(48.5, abs=1.6)
    assert report.rho == pytest.approx(0, abs=0.02)
    assert report.mean("overlap_best") == pytest.approx(12 / 96, abs=0.02)
    assert report.mean("retention") == pytest.approx(0, abs=0.05)
    level = torch.tensor([[0.0], [100.0]]).double()
    report = audit_ranks(level + scores(2), level + scores(2, seed=1), 24)
    assert report.rho < 0.3 < 0.7 < report.pooled_rho


def test_equal_scores_share_their_rank_and_equal_previews_have_no_rho():
    true = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]])
    prompt = audit_ranks(true, true, 4).prompts[0]
    assert (prompt.rank_best, prompt.perfect_best) == (2.5, 2.5)
    assert (prompt.rank_worst, prompt.perfect_worst) == (6.5, 6.5)
    assert prompt.retention == 1 and prompt.rank_random == 4.5
    true = scores(2, 8)
    proxy = true.clone()
    proxy[1] = 0.5
    report = audit_ranks(proxy, true, 4)
    assert report.without_rho == 1 and report.rho == pytest.approx(1)
    blind = report.prompts[1]
    ranked = true[1].argsort(descending=True).argsort() + 1
    assert blind.rank_best == ranked[:2].double().mean()  # by index, as the selection breaks ties
    assert blind.rank_worst == ranked[6:].double().mean()
    assert math.isnan(blind.tau) and math.isnan(blind.rho)
    true = scores(2, 8)
    true[0] = 0.5
    report = audit_ranks(scores(2, 8, seed=1), true, 4)
    empty = report.prompts[0]
    numbers = asdict(empty)
    assert numbers.pop("pairs") == 8 and all(map(math.isnan, numbers.values()))
    assert report.mean("overlap_best") == report.prompts[1].overlap_best


def test_missing_scores_are_left_out_of_both_and_counted():
    true, proxy = scores(2, 12), scores(2, 12, seed=1)
    broken, lost = proxy.clone(), true.clone()
    broken[0, 3], lost[0, 5], lost[0, 3] = NAN, NAN, NAN
    broken[1, 0] = math.inf
    report = audit_ranks(broken, lost, 4)
    assert report.missing == 3 and [p.pairs for p in report.prompts] == [10, 11]
    kept = [i for i in range(12) if i not in (3, 5)]
    assert report.prompts[0] == audit_ranks(proxy[:1, kept], true[:1, kept], 4).prompts[0]
    both = broken.isfinite() & lost.isfinite()
    assert report.pooled_rho == pytest.approx(spearman_rho(proxy[both], true[both]))
    report = audit_ranks(torch.full((2, 6), NAN), scores(2, 6), 4)
    assert math.isnan(report.rho) and math.isnan(report.pooled_rho) and report.missing == 12
    assert report.without_rho == 2 and math.isnan(report.mean("rank_best"))


def test_one_kept_candidate_is_the_worst_and_there_is_no_best():
    prompt = audit_ranks(scores(1), scores(1), 1).prompts[0]
    assert math.isnan(prompt.rank_best) and math.isnan(prompt.overlap_best)
    assert prompt.rank_worst == 96 and math.isnan(prompt.retention)


def test_perfect_previews_choose_what_exact_scores_would_in_every_mode():
    for mode in ["mean_deviation", "extremes_random", "random"]:
        true = scores()
        report = audit_ranks(2 * true, true, 24, mode)
        assert report.mean("overlap_best") == report.mean("overlap_worst") == 1
        assert report.mean("retention") == pytest.approx(1)
        assert report.mean("rank_best") == report.mean("perfect_best")
    true = scores()
    report = audit_ranks(-true, true, 24, "random")
    assert report.mean("rank_best") == report.mean("perfect_worst") > 48.5


def test_a_report_survives_being_written_and_its_summary_has_every_mean():
    true = scores(3, 8)
    true[0] = 0
    report = audit_ranks(scores(3, 8, seed=1), true, 4)
    kind = TypeAdapter(AuditReport)
    text = kind.dump_json(report)
    assert b"NaN" not in text and repr(kind.validate_json(text, strict=True)) == repr(report)
    true = scores(2, 8)
    true[0] = 0
    report = audit_ranks(scores(2, 8, seed=1), true, 4)
    found = report.summary()
    assert (found["no rho"], found["missing"]) == (1, 0)
    own = report.prompts[1]
    assert [found["rho"], found["tau"], found["retention"]] == [own.rho, own.tau, own.retention]
    assert [found[f"rank {side}"] for side in ("best", "worst")] == [own.rank_best, own.rank_worst]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one of each"):
        audit_ranks(scores(2), scores(3), 24)
    with pytest.raises(ValueError, match=r"expected \(prompts, candidates\)"):
        audit_ranks(scores()[0], scores()[0], 24)
    with pytest.raises(ValueError, match="97 of 96"):
        audit_ranks(scores(), scores(), 97)


CPU = Capability(device="cpu", name="cpu", compute=None, scaled_mm=True)
HOPPER = Capability(device="cuda", name="H100", compute=(9, 0), scaled_mm=True)
BLACKWELL = Capability(device="cuda", name="B200", compute=(10, 0), scaled_mm=True)


def report(mix, prompts=3):
    generator = torch.Generator().manual_seed(0)
    true, noise = torch.randn(2, prompts, 32, generator=generator)
    return audit_ranks(mix * true + (1 - mix) * noise, true, 8)


GOOD, BAD = report(1.0), report(0.3)


def judged(found, precision, capability, on_miss: Any = "degrade", **changes) -> AuditDecision:
    options = {"min_rho": 0.8, "steps": 3, "most": 6, "unseen": False} | changes
    resolved = resolve(precision, capability)
    options |= {"iteration": 2, "resolved": resolved, "capability": capability}
    return decide(found, on_miss=on_miss, **options)


def test_candidates_at_or_above_min_rho_are_kept_whatever_a_miss_would_do():
    for on_miss in ["degrade", "stop", "warn"]:
        found = judged(GOOD, "nvfp4", BLACKWELL, on_miss)
        assert (found.passed, found.action, found.next) == (True, "keep", None)
        assert "rho 1.000" in found.text and "3 steps" in found.text
    rho = BAD.rho
    assert judged(BAD, "nvfp4", BLACKWELL, min_rho=rho).passed
    assert not judged(BAD, "nvfp4", BLACKWELL, min_rho=rho + 1e-9).passed
    assert judged(GOOD, "bf16", CPU).text.startswith("audit before iteration 3: candidates (3 ")
    assert "(mean of 1 prompt)" in judged(report(1.0, prompts=1), "bf16", CPU).text


def test_a_miss_goes_one_step_up_in_precision():
    for precision, capability, lower in [
        ("nvfp4", BLACKWELL, "fp8"), ("auto", BLACKWELL, "fp8"), ("fp8", BLACKWELL, "bf16"),
        ("fp8", HOPPER, "bf16"), ("nvfp4-emulated", HOPPER, "fp8"), ("nvfp4-emulated", CPU, "bf16"),
    ]:  # fmt: skip
        found = judged(BAD, precision, capability)
        assert (found.passed, found.action) == (False, "degrade")
        assert found.next is not None and precision_name(found.next) == lower
        assert lower.replace("bf16", "not quantised") in found.text
        assert f"rho {BAD.rho:.3f}" in found.text


def test_a_miss_that_only_warns_or_has_no_lower_precision_changes_nothing():
    found = judged(BAD, "bf16", CPU, steps=4)
    assert (found.passed, found.action, found.next) == (False, "warn", None)
    assert "what is left (rollout.explore.num_inference_steps, now 4 of 6)" in found.text
    found = judged(BAD, "bf16", CPU, steps=6)
    assert found.text.endswith("candidates have as many steps as exact images already")
    found = judged(BAD, "nvfp4", BLACKWELL, "warn")
    assert (found.passed, found.action, found.next) == (False, "warn", None)
    assert "rollout.explore.precision to fp8" in found.text


def test_a_miss_that_stops_names_rho_precision_steps_and_what_to_change():
    found = judged(BAD, "nvfp4-emulated", CPU, "stop", steps=5)
    assert found.action == "stop" and not found.passed and found.next is None
    for part in (f"rho {BAD.rho:.3f}", "5 steps", "min_rho = 0.8", "5 of 6", "precision to bf16"):
        assert part in found.text, part
    found = judged(BAD, "bf16", CPU, "stop")
    assert "raise rollout.explore.num_inference_steps" in found.text
    assert "rollout.explore.precision" not in found.text
    with pytest.raises(ValueError, match="'ignore', expected one of degrade, stop, warn"):
        judged(GOOD, "bf16", CPU, "ignore")


def test_prompts_without_a_rho_are_told_and_nothing_is_blamed_on_the_precision():
    for on_miss in ["degrade", "stop", "warn"]:
        flat = torch.zeros(2, 8)
        found = judged(audit_ranks(flat, torch.rand(2, 8), 4), "nvfp4", BLACKWELL, on_miss)
        assert (found.passed, found.action, found.next) == (False, "warn", None)
        assert "none of the 2 prompts" in found.text and "more steps of a candidate" in found.text
    true = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    true[0] = 1.0
    proxy = true.clone()
    proxy[1, 2] = float("nan")
    found = judged(audit_ranks(proxy, true, 4), "bf16", CPU)
    assert found.passed and "mean of 2 prompts, 1 more without, 1 score missing" in found.text


def test_noise_that_candidates_lack_is_not_blamed_on_precision_or_steps():
    for on_miss, action in [("degrade", "warn"), ("warn", "warn"), ("stop", "stop")]:
        found = judged(BAD, "nvfp4", BLACKWELL, on_miss, unseen=True)
        assert (found.passed, found.action, found.next) == (False, action, None)
        assert "without noise cannot see the noise of the rollout's tree" in found.text
        assert "set rollout.explore.num_inference_steps to null" in found.text
        assert "raise" not in found.text and "explore.precision" not in found.text
        assert judged(GOOD, "nvfp4", BLACKWELL, on_miss, unseen=True).action == "keep"


def test_replaying_the_audits_gives_the_precision_that_they_ended_in():
    start = resolve("nvfp4", BLACKWELL)
    first = judged(BAD, "nvfp4", BLACKWELL).next
    assert first is not None
    for kept in ([], [("nvfp4", None)] * 2):
        assert replay_precision(kept, start, BLACKWELL) == start
    down = [("nvfp4", None), ("nvfp4", "fp8"), ("fp8", None)]
    assert replay_precision(down, start, BLACKWELL) == first
    assert precision_name(replay_precision([*down, ("fp8", "bf16")], start, BLACKWELL)) == "bf16"
    # A device without the step takes the one below; a recipe that asks for more bits keeps them.
    below = replay_precision([("nvfp4-emulated", "fp8")], resolve("nvfp4-emulated", CPU), CPU)
    assert precision_name(below) == "bf16"
    for asked, log in (("bf16", [("nvfp4", "fp8")]), ("fp8", [("nvfp4-emulated", "bf16")])):
        start = resolve(asked, BLACKWELL)
        assert replay_precision(log, start, BLACKWELL) == start


def event(iteration, next=None, seed=0):
    generator = torch.Generator().manual_seed(100 * iteration + seed)
    proxy, true = torch.rand(2, 2, 8, generator=generator)
    return AuditEvent(
        iteration=iteration, precision="nvfp4-emulated", steps=3,
        action="keep" if next is None else "degrade", next=next, text="what was found",
        report=audit_ranks(proxy, true, 4),
    )  # fmt: skip


def test_a_new_folder_has_no_audits_and_reading_makes_no_file(tmp_path):
    log = AuditLog(tmp_path / "run")
    log.rewind(0)
    assert log.before(100) == () and not (tmp_path / "run").exists()


def test_only_the_audits_of_earlier_iterations_are_known(tmp_path):
    log, events = AuditLog(tmp_path), [event(0), event(10, next="bf16"), event(20)]
    for one in events:
        log.record(one)
    known = [AuditLog(tmp_path).before(i) for i in (0, 10, 11, 20, 21)]
    assert known == [tuple(events[:n]) for n in (0, 1, 2, 2, 3)]


def test_a_resumed_run_leaves_the_file_that_an_uninterrupted_one_leaves(tmp_path):
    whole, broken = AuditLog(tmp_path / "whole"), AuditLog(tmp_path / "broken")
    for iteration in (0, 10, 20, 30):
        whole.record(event(iteration))
    for iteration in (0, 10, 20):
        broken.record(event(iteration))
    for iteration in (10, 20, 30):  # from the checkpoint at 5
        assert broken.before(iteration) == whole.before(iteration)
        broken.record(event(iteration))
    assert broken.path.read_bytes() == whole.path.read_bytes()


def test_recording_and_rewinding_drop_the_audits_of_later_iterations(tmp_path):
    log = AuditLog(tmp_path)
    for iteration in (0, 10, 20):
        log.record(event(iteration))
    log.rewind(11)
    assert [e.iteration for e in log.before(100)] == [0, 10]
    log.record(event(20))
    log.record(again := event(10, seed=1))
    assert log.before(100) == (event(0), again)


def test_the_file_is_a_line_of_strict_json_an_audit(tmp_path):
    flat = audit_ranks(torch.zeros(1, 4), torch.rand(1, 4), 2)
    log = AuditLog(tmp_path)
    log.record(AuditEvent(iteration=3, precision="bf16", steps=2, action="warn", next=None,
                          text="", report=flat))  # fmt: skip
    (line,) = (tmp_path / FILE).read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["iteration"] == 3 and row["report"]["prompts"][0]["rho"] is None


def test_a_line_that_is_no_audit_and_a_wrong_order_are_refused(tmp_path):
    log = AuditLog(tmp_path)
    for iteration in (0, 10):
        log.record(event(iteration))
    first, second = log.path.read_text().splitlines()
    changes: list[dict] = [{"iteration": "ten"}, {"action": "panic"}, {"next": 4}, {"report": None}]
    spoiled = [json.dumps(json.loads(second) | change) for change in changes]
    for line in (*spoiled, second[:-20], "[]", "", "\xff\x00"):
        log.path.write_text(f"{first}\n{line}\n", encoding="latin-1")
        with pytest.raises(UserError, match=r"line 2 of .*audits\.jsonl"):
            log.before(20)
    log.path.write_text(f"{second}\n{first}")
    with pytest.raises(UserError, match=r"iterations \[10, 0\], expected ascending"):
        log.before(20)

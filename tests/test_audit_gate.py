"""What follows from an audit: keep, degrade along the ladder, warn, or stop."""

from typing import Any

import pytest
import torch

from flowrl.quantization.backends import Capability, resolve
from flowrl.sampling.rank_audit import Verdict, audit, named, replayed, verdict

CPU = Capability(device="cpu", name="cpu", compute=None, scaled_mm=True)
HOPPER = Capability(device="cuda", name="H100", compute=(9, 0), scaled_mm=True)
BLACKWELL = Capability(device="cuda", name="B200", compute=(10, 0), scaled_mm=True)


def report(mix, prompts=3):
    """Candidates of which `mix` is the exact score; 1 ranks perfectly, 0 at random."""
    generator = torch.Generator().manual_seed(0)
    true, noise = torch.randn(2, prompts, 32, generator=generator)
    return audit(mix * true + (1 - mix) * noise, true, 8)


GOOD, BAD = report(1.0), report(0.3)


def judged(
    found,
    precision,
    capability,
    on_miss: Any = "degrade",
    min_rho=0.8,
    steps=3,
    most=6,
    unseen=False,
) -> Verdict:
    resolved = resolve(precision, capability)
    return verdict(
        found,
        iteration=2,
        min_rho=min_rho,
        on_miss=on_miss,
        resolved=resolved,
        capability=capability,
        steps=steps,
        most=most,
        unseen=unseen,
    )


@pytest.mark.parametrize("on_miss", ["degrade", "stop", "warn"])
def test_candidates_that_rank_well_are_kept_whatever_a_miss_would_do(on_miss):
    found = judged(GOOD, "nvfp4", BLACKWELL, on_miss)
    assert (found.passed, found.action, found.next) == (True, "keep", None)
    assert "rho 1.000" in found.text and "3 steps" in found.text


def test_the_gate_stands_at_min_rho_itself():
    rho = BAD.rho
    assert judged(BAD, "nvfp4", BLACKWELL, min_rho=rho).passed
    assert not judged(BAD, "nvfp4", BLACKWELL, min_rho=rho + 1e-9).passed


@pytest.mark.parametrize(
    ("precision", "capability", "lower"),
    [
        ("nvfp4", BLACKWELL, "fp8"),
        ("auto", BLACKWELL, "fp8"),
        ("fp8", BLACKWELL, "bf16"),
        ("fp8", HOPPER, "bf16"),
        ("nvfp4-emulated", HOPPER, "fp8"),
        ("nvfp4-emulated", CPU, "bf16"),
    ],
)
def test_a_miss_goes_one_step_up_in_precision(precision, capability, lower):
    found = judged(BAD, precision, capability)
    assert (found.passed, found.action) == (False, "degrade")
    assert found.next is not None and named(found.next) == lower
    assert (
        lower.replace("bf16", "not quantised") in found.text and f"rho {BAD.rho:.3f}" in found.text
    )


def test_at_the_end_of_the_ladder_more_steps_are_what_is_left():
    found = judged(BAD, "bf16", CPU, steps=4)
    assert (found.passed, found.action, found.next) == (False, "warn", None)
    assert "what is left (rollout.explore.steps, now 4 of 6)" in found.text
    found = judged(BAD, "bf16", CPU, steps=6)
    assert found.text.endswith("candidates have as many steps as exact pictures already")


def test_a_miss_that_only_warns_changes_nothing():
    found = judged(BAD, "nvfp4", BLACKWELL, "warn")
    assert (found.passed, found.action, found.next) == (False, "warn", None)
    assert "rollout.explore.precision to fp8" in found.text


def test_a_miss_that_stops_names_rho_precision_steps_and_what_to_change():
    found = judged(BAD, "nvfp4-emulated", CPU, "stop", steps=5)
    assert found.action == "stop" and not found.passed and found.next is None
    for part in (
        f"rho {BAD.rho:.3f}",
        "nvfp4-emulated",
        "5 steps",
        "min_rho = 0.8",
        "raise rollout.explore.steps, now 5 of 6",
        "rollout.explore.precision to bf16",
        "set rollout.explore.audit.on_miss to warn",
    ):
        assert part in found.text


def test_stopping_at_bf16_offers_no_lower_precision():
    found = judged(BAD, "bf16", CPU, "stop")
    assert "raise rollout.explore.steps" in found.text
    assert "rollout.explore.precision" not in found.text


@pytest.mark.parametrize("on_miss", ["degrade", "stop", "warn"])
def test_where_no_prompt_has_a_rho_nothing_is_blamed_on_the_precision(on_miss):
    flat = torch.zeros(2, 8)
    found = judged(audit(flat, torch.rand(2, 8), 4), "nvfp4", BLACKWELL, on_miss)
    assert (found.passed, found.action, found.next) == (False, "warn", None)
    assert "none of the 2 prompts" in found.text and "more steps of a candidate" in found.text


def test_prompts_without_a_rho_and_missing_scores_are_told():
    true = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    true[0] = 1.0
    proxy = true.clone()
    proxy[1, 2] = float("nan")
    found = judged(audit(proxy, true, 4), "bf16", CPU)
    assert found.passed and "mean of 2 prompts, 1 more without, 1 score missing" in found.text


@pytest.mark.parametrize(
    ("on_miss", "action"), [("degrade", "warn"), ("warn", "warn"), ("stop", "stop")]
)
def test_noise_that_candidates_lack_is_not_blamed_on_precision_or_steps(on_miss, action):
    found = judged(BAD, "nvfp4", BLACKWELL, on_miss, unseen=True)
    assert (found.passed, found.action, found.next) == (False, action, None)
    assert "without noise cannot see the noise of the rollout's tree" in found.text
    assert "set rollout.explore.steps to null" in found.text
    assert "raise" not in found.text and "explore.precision" not in found.text
    assert judged(GOOD, "nvfp4", BLACKWELL, on_miss, unseen=True).action == "keep"


def test_iterations_are_told_as_people_count_them():
    assert judged(GOOD, "bf16", CPU).text.startswith("audit before iteration 3: candidates (3 ")
    assert "(mean of 1 prompt)" in judged(report(1.0, prompts=1), "bf16", CPU).text


def test_an_unknown_way_to_miss_is_refused():
    with pytest.raises(ValueError, match="'ignore', expected one of degrade, stop, warn"):
        judged(GOOD, "bf16", CPU, "ignore")


def test_replaying_the_audits_gives_the_precision_that_they_ended_in():
    start = resolve("nvfp4", BLACKWELL)
    first = judged(BAD, "nvfp4", BLACKWELL).next
    assert first is not None
    assert (
        replayed([], start, BLACKWELL) == replayed([("nvfp4", None)] * 2, start, BLACKWELL) == start
    )
    down = [("nvfp4", None), ("nvfp4", "fp8"), ("fp8", None)]
    assert replayed(down, start, BLACKWELL) == first
    assert named(replayed([*down, ("fp8", "bf16")], start, BLACKWELL)) == "bf16"


def test_replaying_on_a_device_without_the_step_takes_the_one_below():
    assert (
        named(replayed([("nvfp4-emulated", "fp8")], resolve("nvfp4-emulated", CPU), CPU)) == "bf16"
    )


def test_a_recipe_that_now_asks_for_more_bits_keeps_them():
    start = resolve("bf16", BLACKWELL)
    assert replayed([("nvfp4", "fp8")], start, BLACKWELL) == start


def test_audits_of_a_precision_that_the_recipe_has_left_are_passed_over():
    start = resolve("fp8", BLACKWELL)
    assert replayed([("nvfp4-emulated", "bf16")], start, BLACKWELL) == start

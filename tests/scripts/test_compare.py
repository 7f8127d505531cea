"""Methods side by side: intervals, data files, pages, and runs that happen once."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from flowrl.config import load_config
from scripts.compare import intervals, runs
from scripts.compare.break_even import DRAFTS, break_even, speed_range
from scripts.compare.data import (
    IMAGES,
    chosen,
)
from scripts.compare.page import load_page, page_names
from scripts.compare.report import (
    break_even_table,
    differences_table,
    rules_table,
    text_of,
    turns_table,
)
from scripts.compare.results import Results

# --- intervals -----------------------------------------------------------------------------------


def test_the_interval_over_seeds_is_that_of_the_t_test():
    values = [0.1, 0.14, 0.09, 0.2, 0.12]
    found, expected = (
        intervals.over_seeds(values),
        stats.ttest_1samp(values, 0).confidence_interval(),
    )
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(0.13)
    alone = intervals.over_seeds([0.5])
    assert alone.mean == 0.5 and math.isnan(alone.low) and math.isnan(alone.high)


def test_images_of_one_request_count_as_one_draw():
    generator = np.random.default_rng(1)
    request = np.repeat(np.arange(30), 20)
    change = generator.normal(size=30)[request]  # alike within a request
    whole = intervals.over_requests(change, request.tolist())
    alone = intervals.over_requests(change, list(range(600)))
    assert whole.mean == alone.mean == pytest.approx(change.mean())
    ratio = (whole.high - whole.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(math.sqrt(20), rel=0.1)
    assert intervals.over_requests(change, request.tolist()) == whole  # the same again


def test_the_interquartile_mean_leaves_the_outer_quarters_out():
    found = intervals.interquartile_mean([0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 9.0])
    assert found.mean == pytest.approx((0.5 + 0.6 + 0.7 + 0.8) / 4)
    assert found.low < found.mean < found.high < 9


SLOW = [[(0, 0.1), (10, 0.2), (20, 0.4)], [(0, 0.1), (10, 0.4), (20, 0.6)]]
FAST = [[(0, 0.1), (5, 0.5), (10, 0.3)], [(0, 0.1), (5, 0.5), (10, 0.7)]]


def test_methods_are_compared_at_the_cost_that_all_have_reached():
    cost, found = intervals.at_equal_cost(FAST, SLOW)
    assert cost == 10
    assert found.mean == pytest.approx(((0.3 - 0.2) + (0.7 - 0.4)) / 2)
    paired = intervals.over_seeds([0.1, 0.3])
    assert (found.low, found.high) == pytest.approx((paired.low, paired.high))
    assert intervals.score_at(SLOW[0], 15) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="not within 0 to 20"):
        intervals.score_at(SLOW[0], 25)


def test_reaching_is_not_staying_above():
    curve = [(0, 0.1), (5, 0.5), (10, 0.3), (15, 0.45)]
    assert intervals.reaches(curve, 0.3) == pytest.approx(2.5)
    assert intervals.stays_above(curve, 0.3) == 5
    assert intervals.stays_above(curve, 0.4) == 15
    assert intervals.reaches(curve, 0.9) is None and intervals.stays_above(curve, 0.5) is None


# --- data and pages ------------------------------------------------------------------------------

GALLERY = Path(__file__).parents[2] / "gallery"


RENDERED = [name for name in page_names() if (GALLERY / name / IMAGES).is_file()]


@functools.cache
def results_of(name: str) -> Results:
    return Results.read(load_page(name), GALLERY / name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "overoptimisation" else pytest.mark.slow) for n in RENDERED],
)
def test_pages_of_the_gallery_are_what_their_data_say(name):
    text = text_of(results_of(name), GALLERY / name)
    assert (GALLERY / name / "README.md").read_text(encoding="utf-8") == text


def cells(table, method: str) -> dict[str, str]:
    return next(row for row in table if row["method"] == method)


def read_page(*path: str) -> str:
    return " ".join(GALLERY.parent.joinpath(*path).read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_docs_say_of_two_stages_what_their_page_says():
    page = load_page("solrl")
    results = results_of("solrl")
    assert {len(runs) for runs in results.lines.values()} == {5}
    table = differences_table(results, page.baseline)
    drafted, control = (cells(table, f"24 of 96, {how}") for how in ("low-bit drafts", "at random"))
    better, random_ = (
        row["above at equal iterations"].partition(" (at")[0] for row in (drafted, control)
    )
    assert "[0." in better and "[-" in random_  # above 0, and about 0
    gold = drafted["geneval_strict above at the end"]
    paid = cells(differences_table(results, page.longer), "24 of 96, low-bit drafts")
    needed = cells(break_even_table(results), "24 of 96, low-bit drafts")
    text = read_page("docs", "sol-rl.md")
    assert better in text and random_ in text and gold in text
    against = differences_table(results, "24 of 96, at random")
    for how in ("low-bit drafts", "low-bit drafts, the rate of 24 of 24"):
        row = cells(against, f"24 of 96, {how}")
        assert row["above at equal iterations"].partition(" (at")[0] in text, how
    for how in ("exact drafts", "the drafts themselves", "low-bit drafts, the rate of 24 of 24"):
        row = cells(table, f"24 of 96, {how}")
        assert row["above at equal iterations"].partition(" (at")[0] in text, how
    assert paid["above at equal wall time"].partition(" (at")[0] in text
    assert f"{needed['break-even speed']} times as fast" in text
    assert better in read_page("gallery", "README.md")


def test_docs_say_of_over_optimisation_what_its_page_says():
    page = load_page("overoptimisation")
    results = results_of("overoptimisation")
    assert len(results.lines) >= 8 and {len(runs) for runs in results.lines.values()} == {5}
    turns = turns_table(results)
    rules = rules_table(results)
    text = read_page("docs", "objectives.md")
    row = cells(turns, "DiffusionNFT")
    assert row["gold at its highest"] in text and row["gold at the end"] in text
    assert f"after {row['iteration']} iterations" in text
    table = differences_table(results, page.baseline)
    for method in ("DiffusionNFT, KL 0.4", "DiffusionNFT, half the rate"):
        assert cells(table, method)["geneval_strict above at the end"] in text, method
    for rule in ("on_hacking", "the second judge stands"):
        assert cells(rules, "DiffusionNFT")[rule] in text, rule


def test_drafts_pay_from_the_speed_at_which_both_cost_the_same():
    chosen_ones = [[(0, 0.2), (10, 0.4)], [(0, 0.2), (10, 0.6)]]  # 0.5 after 10 iterations
    plain = [[(0, 0.2), (10, 0.3), (30, 0.7)]]  # 0.5 after 20
    stage = {DRAFTS: 9.0, "time/rollout": 1.0, "time/train": 2.0}
    found = break_even(chosen_ones, plain, stage, 2.5, exact=6.0)
    # 20 * 2.5 s = 50 s: 10 iterations may take 5 s each, 2 s of them for drafts.
    assert (found.level, found.iterations, found.others) == pytest.approx((0.5, 20, 3))
    assert (found.affordable, found.speed) == pytest.approx((2, 3))
    assert 10 * (found.others + 6 / found.speed) == pytest.approx(found.iterations * 2.5)
    free = break_even(chosen_ones, plain, stage, 1.0, exact=6.0)
    assert free.affordable < 0 and math.isinf(free.speed)
    ahead = break_even([[(0, 0.2), (10, 0.8)]], plain, stage, 2.5, exact=6.0)
    assert ahead.iterations is None and ahead.longest == 30 and ahead.affordable == 4.5
    unknown = break_even([[(0, 0.2), (30, 0.8)]], plain, stage, 1.0, exact=6.0)
    assert unknown.iterations is None and unknown.affordable < 0

    same = [plain[0]] * 3
    one = break_even([chosen_ones[0]] * 3, same, stage, 2.5, exact=6.0).speed
    assert speed_range([chosen_ones[0]] * 3, same, stage, 2.5, exact=6.0) == (one, one)
    low, high = speed_range(chosen_ones, plain * 2, stage, 2.5, exact=6.0)
    assert low <= found.speed <= high and low < high


def test_presets_have_the_values_that_did_best_on_validation_prompts():
    quickstarts = {"quickstart", "quickstart-flux", "quickstart-sana"}
    presets = {"quickstarts": quickstarts, "trees": {"BranchGRPO-Mix"}}
    for page, names in ((load_page(name), names) for name, names in presets.items()):
        tuned = chosen(GALLERY / page.name)
        assert names <= set(tuned)
        for name, options in tuned.items():
            method = page.method(name)
            if name in names or page.name == "quickstarts":  # where others say what they have
                own = [f"run.iterations={method.iterations}", *method.options]
                found = load_config(method.recipe, [*own, *options])
                assert found == load_config(method.recipe, own), (name, options)
            if name in names:
                preset = load_config(method.recipe)
                assert load_config(method.recipe, list(options)) == preset
                assert preset.run.iterations == method.iterations


def test_every_page_names_its_baseline_and_runs_that_stop_by_iterations():
    assert {"quickstarts", "trees", "solrl"} <= set(page_names())
    for name in page_names():
        page = load_page(name)
        names = [method.name for method in page.methods]
        assert page.baseline in names and len(set(names)) == len(names)
        assert len({runs.slug(name) for name in names}) == len(names) and page.seeds >= 3
        for method in page.methods:
            for choice in method.choices():
                config = page.config(method, 3, Path("x"), *choice)
                assert config.run.max_minutes is None and config.run.seed == 3
                assert config.evaluation.step_counts == (method.steps or page.steps)
                assert not method.steps or config.rollout.num_inference_steps == method.steps[0]
                measured = {"geneval_strict" if r.args else r.name for r in config.rewards}
                assert {page.score, page.quality} <= measured
                assert list(config.plans())


# --- over-optimisation ---------------------------------------------------------------------------

"""Methods side by side: intervals, data files, pages, and runs that happen once."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from flowrl.config import load_config
from scripts.compare import intervals, runs
from scripts.compare.break_even import DRAFTS, break_even, speed_range
from scripts.compare.charts import charts
from scripts.compare.data import (
    CURVES,
    IMAGES,
    Image,
    Line,
    chosen,
    read_curves,
    read_images,
    write_curves,
    write_images,
    write_rows,
)
from scripts.compare.law import variety
from scripts.compare.page import Method, Page, load_page, page_names
from scripts.compare.report import (
    break_even_table,
    differences_table,
    kept_most,
    render,
    rules_table,
    scores_table,
    text_of,
    turns_say,
    turns_table,
)
from scripts.compare.results import Results
from scripts.compare.turning import RULES, stopped, turn

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
METHODS = tuple(
    Method(name=name, recipe="quickstart", options=(), iterations=20, tune=tune, note="")
    for name, tune in (("chains", ()), ("tree", ({"optim.lr": [1e-4, 2e-4]},)), ("late", ()))
)
PAGE = Page(
    name="small", title="Small", text="What was planted.", baseline="chains", score="strict",
    gold="strict", proxy="partial", quality="good", judge="", seeds=3, steps=(5, 28),
    validation="tiny:colors:train", methods=METHODS,
)  # fmt: skip


def lines(method: str, seed: int, last: float, forwards: float = 100.0) -> list[Line]:
    """A run whose scores rise from 0.2 to `last`, more steps scored at both ends alone."""
    found = []
    for i, iteration in enumerate((0, 10, 20)):
        score = 0.2 + (last - 0.2) * i / 2
        scores = {"strict": score, "partial": score + 0.1, "good": 4.0}
        if iteration != 10:
            scores["28_steps/strict"] = score + 0.05
        found.append(
            Line(
                method=method,
                seed=seed,
                iteration=iteration,
                forwards=forwards * iteration,
                images=8.0 * iteration,
                scores=scores,
            )  # fmt: skip
        )
    return found


def pictures(method: str, seed: int, iteration: int, scores: list[float]) -> list[Image]:
    return [
        Image(
            method=method, seed=seed, iteration=iteration, image=i, request=i // 2,
            scores={"strict": score, "28_steps/strict": score, "good": 4.0},
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip


@pytest.fixture
def data(tmp_path) -> Path:
    finals = {"chains": (0.4, 0.5, 0.6), "tree": (0.6, 0.7, 0.8)}
    found = [
        row for m, own in finals.items() for s, last in enumerate(own) for row in lines(m, s, last)
    ]
    write_curves(tmp_path, found)
    images = []
    for method in finals:
        images += pictures(method, 0, 0, [0, 0, 1, 0])
        for seed in range(3):
            images += pictures(method, seed, 20, [1, 0, 1, 1])
    write_images(tmp_path, images)
    return tmp_path


def test_data_are_read_as_they_were_written_and_equal_data_are_equal_files(data, tmp_path):
    curves, images = read_curves(data), read_images(data)
    assert curves[2].scores == pytest.approx(
        {"strict": 0.4, "partial": 0.5, "good": 4, "28_steps/strict": 0.45}
    )
    assert "28_steps/strict" not in curves[1].scores
    before = [(data / name).read_bytes() for name in (CURVES, IMAGES)]
    write_curves(data, curves)
    write_images(data, images)
    assert [(data / name).read_bytes() for name in (CURVES, IMAGES)] == before


def test_a_page_has_what_its_data_say_and_what_is_missing(data):
    chains, tree = scores_table(Results.read(PAGE, data))
    assert chains["strict, 5 steps"] == "0.200 → 0.500"
    expected = intervals.over_seeds([0.2, 0.3, 0.4])
    assert (
        chains["change over seeds, 5 steps"] == f"+0.300 [{expected.low:.3f}, {expected.high:.3f}]"
    )
    assert tree["strict, 28 steps"] == "0.250 → 0.750"
    assert tree["over images, 5 steps"].startswith("+0.500 [")
    assert tree["interquartile mean"] == "n/a" and tree["forwards"] == "2000"
    text = render(PAGE, data).read_text()
    assert "No runs yet: late." in text and "Seconds of an iteration were not measured" in text
    assert "equal wall time" not in text and (data / "strict-forwards.png").is_file()
    assert "What was planted." in text and "Fewer than 3 seeds" not in text


def test_pages_of_the_gallery_are_what_their_data_say():
    rendered = [name for name in page_names() if (GALLERY / name / IMAGES).is_file()]
    assert {"quickstarts", "trees", "solrl", "overoptimisation"} <= set(rendered)
    for name in rendered:
        data = GALLERY / name
        text = text_of(Results.read(load_page(name), data), data)
        assert (data / "README.md").read_text(encoding="utf-8") == text, name


def cells(table, method: str) -> dict[str, str]:
    return next(row for row in table if row["method"] == method)


def read_page(*path: str) -> str:
    return " ".join(GALLERY.parent.joinpath(*path).read_text(encoding="utf-8").split())


def test_docs_say_of_two_stages_what_their_page_says():
    page = load_page("solrl")
    results = Results.read(page, GALLERY / "solrl")
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
    results = Results.read(page, GALLERY / "overoptimisation")
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
    for rule in ("stop_when_hacking", "the second judge stands"):
        assert cells(rules, "DiffusionNFT")[rule] in text, rule


def test_wall_time_is_iterations_times_measured_rates(data):
    measured = [("chains", "4"), ("chains", "2"), ("chains", "3"), ("tree", "1")]
    rows = [{"method": m, "round": 0, "seconds": s} for m, s in measured]
    write_rows(data / "rates.csv", rows)
    results = Results.read(PAGE, data)
    chains, tree = scores_table(results)
    assert (chains["seconds"], tree["seconds"]) == ("60", "20")
    _, row = differences_table(results, "chains")
    # At 20 s the tree has ended and chains are a third of their way.
    assert (
        row["above at equal wall time"].startswith("+0.400 [")
        and "(at 20)" in row["above at equal wall time"]
    )
    assert row["reaches the last, 0.500, in wall time"] == "20%"
    assert row["reaches the highest, 0.500, in wall time"] == "20%"
    assert row["stays above, in wall time"] == "33%"
    assert row["above at equal forwards"].startswith("+0.200 [0.200, 0.200] (at 2e+03)")


def test_drafts_pay_from_the_speed_at_which_both_cost_the_same(data):
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


def test_the_best_of_what_was_tried_on_validation_prompts_is_taken(data):
    tried = [("tree", "optim.lr=0.0001", "0.5"), ("tree", "optim.lr=0.0002", "0.6")]
    write_rows(data / "tuning.csv", [{"method": m, "options": o, "score": s} for m, o, s in tried])
    assert chosen(data) == {"tree": ("optim.lr=0.0002",)}
    page = replace(PAGE, methods=METHODS[:2])
    jobs = runs.jobs_of(page, data / "runs", data, 2)
    assert [job.name for job in jobs] == [
        "chains, seed 0",
        "tree, seed 0",
        "chains, seed 1",
        "tree, seed 1",
    ]
    assert [job.config.optim.lr for job in jobs[:2]] == [load_config("quickstart").optim.lr, 2e-4]
    found = [
        (choice, job.config.evaluation.prompts) for _, choice, job in runs.tuning_jobs(page, data)
    ]
    assert found == [((f"optim.lr={lr}",), "tiny:colors:train") for lr in (1e-4, 2e-4)]
    assert "| tree | optim.lr=0.0002 | 0.6 | yes |" in render(page, data).read_text()


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
    assert {"quickstarts", "trees", "objectives", "solrl"} <= set(page_names())
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


def hacked(seed: int, gold: list[float], judge: list[float], quality: list[float]) -> list[Line]:
    proxy = [0.5, 0.7, 0.9, 0.96, 0.99]
    columns = zip(gold, judge, quality, proxy, strict=True)
    return [
        Line(
            method="chains", seed=seed, iteration=10 * i, forwards=i, images=i,
            scores=dict(zip(("strict", "judge", "good", "partial"), scores, strict=True)),
        )
        for i, scores in enumerate(columns)
    ]  # fmt: skip


def test_gold_turns_where_its_mean_is_highest_and_rules_see_all_but_gold():
    page = replace(PAGE, judge="judge")
    runs_ = [
        hacked(0, [0.5, 0.6, 0.7, 0.6, 0.4], [0.5, 0.6, 0.62, 0.6, 0.5], [4.0, 4.0, 4.0, 3.8, 3]),
        hacked(1, [0.5, 0.7, 0.6, 0.5, 0.3], [0.5, 0.6, 0.55, 0.5, 0.7], [4.0, 3.8, 4.0, 3.8, 3]),
    ]
    found = turn(runs_, page)
    assert found.iteration == 10  # the first of equal means
    assert (found.gold.mean, found.last.mean) == pytest.approx((0.65, 0.35))
    paired = intervals.over_seeds([0.4 - 0.6, 0.3 - 0.7])
    assert (found.lost.mean, found.lost.low) == pytest.approx((paired.mean, paired.low))
    assert (found.proxy, found.proxy_last) == pytest.approx((0.7, 0.99))
    kept = {name: intervals.mean(stopped(runs_, page, rule)) for name, rule in RULES.items()}
    assert kept == pytest.approx(
        {
            "to the end": (0.4 + 0.3) / 2,
            "stop_when_hacking": (0.4 + 0.3) / 2,  # never three below the judge's best in a row
            "the second judge stands": (0.7 + 0.7) / 2,  # its best: evaluations 2 and 1
            "quality falls": (0.7 + 0.5) / 2,  # before 3 and before 1
        }
    )
    by_method = {"chains": dict(enumerate(runs_)), "tree": {0: runs_[0]}}
    found = Results(page=page, lines=by_method, base_images={}, images={}, rates={}, stages={})
    assert [chart.file for chart in charts(found)][0] == "gold-proxy.png"
    assert all(chart.draw().startswith(b"\x89PNG") for chart in charts(found))
    text = kept_most(found)
    assert "tree ends highest, at 0.400 (one seed): +0.000 (one seed) above chains" in text
    assert "Of the rules, *the second judge stands* keeps most of chains: 0.700 [" in text
    assert "+0.350 [" in text and "to tree it adds +0.300 (one seed)" in text
    assert "below 0 for: none. Highest at one of the last two" in turns_say(found)
    late = hacked(2, [0.5] * 5, [0.5, 0.7, 0.6, 0.5, 0.4], [4.0] * 5)  # the judge falls thrice
    assert RULES["stop_when_hacking"](late, page) == 1
    blind = [[replace(line, scores=line.scores | {"strict": 0.0}) for line in r] for r in runs_]
    assert [rule(a, page) for rule in RULES.values() for a in runs_] == [
        rule(a, page) for rule in RULES.values() for a in blind
    ]


# --- the tiny world's law ------------------------------------------------------------------------


def test_the_variety_of_few_images_is_not_biased():
    generator, runs = np.random.default_rng(0), []
    for _ in range(400):
        freedom = np.repeat([4.0, 12.0], 40)
        layout = generator.integers(0, freedom)
        runs.append(
            variety(np.repeat(np.arange(20), 4).tolist(), layout.tolist(), freedom.tolist())
        )
    for name, law in (("collisions", (1 / 4 + 1 / 12) / 2), ("divergence", 0.0)):
        values = [getattr(run, name) for run in runs]
        assert np.mean(values) == pytest.approx(law, abs=4 * np.std(values) / 20)

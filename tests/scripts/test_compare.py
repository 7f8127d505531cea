"""Methods side by side: intervals, data files, pages, and runs that happen once."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from flowrl.config import load_config
from scripts.compare import intervals, runs
from scripts.compare.data import IMAGES, chosen
from scripts.compare.page import load_page, page_names
from scripts.compare.report import text_of
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


# --- data and pages ------------------------------------------------------------------------------

GALLERY = Path(__file__).parents[2] / "gallery"


RENDERED = [name for name in page_names() if (GALLERY / name / IMAGES).is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_pages_of_the_gallery_are_what_their_data_say(name):
    text = text_of(Results.read(load_page(name), GALLERY / name), GALLERY / name)
    assert (GALLERY / name / "README.md").read_text(encoding="utf-8") == text


def test_presets_have_the_values_that_did_best_on_validation_prompts():
    presets = {"quickstart", "quickstart-flux", "quickstart-sana"}
    page = load_page("quickstarts")
    tuned = chosen(GALLERY / page.name)
    assert presets <= set(tuned)
    for name, options in tuned.items():
        method = page.method(name)
        own = [f"run.iterations={method.iterations}", *method.options]
        found = load_config(method.recipe, [*own, *options])
        assert found == load_config(method.recipe, own), (name, options)
        if name in presets:
            preset = load_config(method.recipe)
            assert load_config(method.recipe, list(options)) == preset
            assert preset.run.iterations == method.iterations


def test_every_page_names_its_baseline_and_runs_that_stop_by_iterations():
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

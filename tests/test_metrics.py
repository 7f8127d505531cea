"""Every metric has a meaning, and the page of metrics is the one this dictionary makes."""

from pathlib import Path

import pytest

from flowrl.training.metrics import METRICS, meaning, page

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_metrics_is_up_to_date():
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert text == page(), "run `python -m flowrl.training.metrics > docs/metrics.md`"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/geneval", "reward/<name>"),
        ("reward/std_in_group", "reward/std_in_group"),
        ("policy/clip_share/step_3", "policy/clip_share/step_<i>"),
        ("policy/ratio_std/step_12", "policy/ratio_std/step_<i>"),
    ],
)
def test_a_logged_name_finds_its_meaning(name, form):
    assert meaning(name) == METRICS[form]


@pytest.mark.parametrize("name", ["rewards/mean", "policy/clip_share/step_x", "reward/a/b", ""])
def test_a_name_that_is_not_documented_has_no_meaning(name):
    assert meaning(name) is None

"""Every metric has a meaning, and the page of metrics is the one this dictionary makes."""

from pathlib import Path

from flowrl.training.metrics import METRICS, meaning, page

DOCS = Path(__file__).parents[2] / "docs"


def test_every_metric_has_a_meaning_and_the_page_is_up_to_date():
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert text == page(), "run `python -m flowrl.training.metrics > docs/metrics.md`"
    # A logged name finds its meaning.
    for name, form in [
        ("reward/mean", "reward/mean"),
        ("reward/geneval", "reward/<name>"),
        ("reward/std_in_group", "reward/std_in_group"),
        ("policy/clip_share/step_3", "policy/clip_share/step_<i>"),
        ("policy/ratio_std/step_12", "policy/ratio_std/step_<i>"),
    ]:
        assert meaning(name) == METRICS[form]
    # A name that is not documented has no meaning.
    for name in ["rewards/mean", "policy/clip_share/step_x", "reward/a/b", ""]:
        assert meaning(name) is None

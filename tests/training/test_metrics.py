"""Every metric has a meaning, and the page of metrics is the one this dictionary makes."""

import json
from pathlib import Path

import pytest

from flowrl.training.metrics import METRICS, meaning, over_processes, page


class Two:
    """The runtime of a process beside another that has sent `text`."""

    world_size, rank = 2, 0

    def __init__(self, other: dict[str, tuple[float, float]]):
        self.text = json.dumps(other)

    def merge(self, texts):
        return {"000001": self.text} | texts


def test_metrics_of_processes_are_joined_by_rows_counts_and_maxima():
    other = {"loss": (4.0, 1), "tree/leaves": (3.0, 5), "a_max": (1.0, 9), "latent/norm": (4.0, 1)}
    own = {"loss": 1.0, "tree/leaves": 6.0, "a_max": 2.0, "latent/norm": 2.0}
    weights = {"loss": 3, "tree/leaves": 2, "a_max": 1, "latent/norm": 1}
    found = over_processes(own, weights, Two(other | {"policy/kl": (7.0, 2)}))  # type: ignore[arg-type]
    norm = pytest.approx(10**0.5)
    assert found == {
        "loss": 1.75, "tree/leaves": 9.0, "a_max": 2.0, "latent/norm": norm, "policy/kl": 7.0,
    }  # fmt: skip


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

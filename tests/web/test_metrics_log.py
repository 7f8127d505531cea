"""A file of metrics, read as it grows: curves, and damage counted."""

from typing import Any

import pytest

from flowrl.utils.journal import seal_line
from flowrl.web import metrics_log
from flowrl.web.metrics_log import MetricsLog


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def line(**row) -> str:
    return seal_line(row).decode() + "\n"


def lines(*steps: int) -> str:
    return "".join(line(step=s, loss=s / 2) for s in steps)


def curve(log, name="loss", most=10**6) -> Any:
    log.read()
    return log.points([name], most).get(name)


def test_a_growing_file_is_read_again_where_it_has_changed(path):
    log = MetricsLog(path)
    assert curve(log) is None  # no file yet
    third = line(step=3, loss=7)
    path.write_text(lines(1, 2) + third[:15])
    assert curve(log) == {"x": [1, 2], "y": [0.5, 1.0]}
    with open(path, "a") as file:
        file.write(third[15:] + lines(4))
    assert curve(log) == {"x": [1, 2, 3, 4], "y": [0.5, 1.0, 7.0, 2.0]}
    assert log.damaged == 0


def test_a_file_that_a_resumed_run_has_replaced_is_read_anew(path, tmp_path):
    path.write_text(lines(1, 2, 3, 4))
    log = MetricsLog(path)
    assert curve(log)["x"] == [1, 2, 3, 4]
    (tmp_path / "new").write_text(lines(1, 2) + line(step=3, loss=8.0) + lines(4, 5))
    (tmp_path / "new").replace(path)
    assert curve(log)["y"] == [0.5, 1.0, 8.0, 2.0, 2.5]
    path.unlink()
    assert curve(log) is None


def test_a_curve_has_at_most_as_many_points_as_asked_for_and_its_last(path):
    path.write_text(line(step=0, **{"eval/a": 0.25}) + lines(*range(1, 1001)))
    log = MetricsLog(path)
    few = curve(log, most=5)["x"]
    assert len(few) <= 5 and few[-1] == 1000 and curve(log)["x"] == list(range(1, 1001))
    means = log.means()["loss"]
    assert means["mean"] == pytest.approx(250.25) and means["last"] == 500
    with open(path, "a") as file:
        file.write(line(step=1001, **{"eval/a": 0.75}))
    log.read()
    assert log.ends() == {
        "step": 1001, "latest": {"loss": 500.0}, "base": {"eval/a": 0.25},
        "held_out": {"eval/a": 0.75}, "held_out_step": 1001,
    }  # fmt: skip


def test_a_file_that_is_too_long_has_no_curves(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "MOST_BYTES", 200)
    path.write_text(lines(*range(20)))
    assert curve(MetricsLog(path)) is None


def test_lines_that_are_not_metrics_are_counted_and_left_out(path):
    bad = ["{", "3", '{"step": true, "a": 1}', '{"a": 1}', '{"step": -1}', "[" * 500, "x" * 9000]
    path.write_text(lines(1) + "\n".join(bad) + "\n" + lines(2))
    log = MetricsLog(path)
    assert curve(log)["x"] == [1, 2]
    assert log.names == ["loss"] and log.damaged == len(bad)


def test_values_that_are_not_finite_numbers_are_gaps_or_left_out(path):
    row = {"a": None, "b": "x", "c": True, "d": float("nan"), "e": 10**400, "f": 2}
    path.write_text(line(step=1, **row))
    log = MetricsLog(path)
    values = {name: curve(log, name) for name in "abcdef"}
    assert {name for name in values if values[name]} == set("adef") and log.damaged == 0
    assert values["f"]["y"] == [2.0]
    assert all(values[name]["y"] == [None] for name in "ade")

"""A file of metrics, read as it grows: curves in bounded memory, damage counted."""

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


def test_a_long_run_is_thinned_out_evenly_and_keeps_its_ends_and_evaluations(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "LIMIT", 50)
    log, text = MetricsLog(path), line(step=0, **{"eval/a": 0.25})
    for begin in range(1, 1001, 40):  # however it grows
        text += lines(*range(begin, min(begin + 40, 1001)))
        text += line(step=begin + 1, **{"eval/a": 0.5}) if begin == 401 else ""
        path.write_text(text)
        steps = curve(log)["x"]
        assert len(steps) <= 50 and steps[-1] == min(begin + 39, 1000)
    inner = [step for step in steps[:-1] if step != 402]
    gaps = {b - a for a, b in zip(inner, inner[1:], strict=False)}
    assert len(gaps) == 1 and gaps <= {32}
    assert curve(log, "eval/a") == {"x": [0, 402], "y": [0.25, 0.5]}
    means = log.means()["loss"]
    assert means["mean"] == pytest.approx(250, rel=0.05) and means["last"] == 500
    few = curve(log, most=5)["x"]
    assert len(few) <= 5 and few[-1] == 1000


def test_of_a_long_file_the_beginning_and_the_end_are_read(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "HEAD", 200)
    monkeypatch.setattr(metrics_log, "TAIL", 400)
    base, last = line(step=0, **{"eval/a": 0.25}), line(step=90, **{"eval/a": 0.5})
    path.write_text(base + lines(*range(1, 91)) + last + lines(91))
    log = MetricsLog(path)
    assert 0 < len(curve(log)["x"]) < 30 and log.damaged == 0
    ends = {
        "step": 91, "latest": {"loss": 45.5}, "base": {"eval/a": 0.25},
        "held_out": {"eval/a": 0.5}, "held_out_step": 90,
    }  # fmt: skip
    assert log.ends() == ends
    with open(path, "a") as file:
        file.write(line(step=92, **{"eval/a": 0.75}))
    log.read()
    assert log.ends() == ends | {"step": 92, "held_out": {"eval/a": 0.75}, "held_out_step": 92}


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

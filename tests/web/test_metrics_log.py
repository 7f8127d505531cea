"""Curves in bounded memory: what is kept of a file of metrics, however it grew."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.utils.journal import seal_line
from flowrl.web import metrics_log
from flowrl.web.metrics_log import LIMIT, Glance, MetricsLog, Series, chosen_first, held_out_first

values = st.floats(-1e6, 1e6) | st.just(float("nan"))


def series_of(numbers: list[float], cuts: list[int]) -> Series:
    series, steps = Series(), np.arange(1, len(numbers) + 1)
    for part in np.split(np.arange(len(numbers)), sorted({c % (len(numbers) + 1) for c in cuts})):
        if len(part):
            series.add(steps[part], np.array(numbers)[part])
    return series


@settings(max_examples=40)
@given(st.lists(values, min_size=1, max_size=60), st.lists(st.integers(0, 99), max_size=5))
def test_points_are_mean_lowest_and_highest_of_rows_in_a_row_however_they_came(numbers, cuts):
    kept = metrics_log.LIMIT
    metrics_log.LIMIT = 8
    try:
        points = series_of(numbers, cuts).points(8)
    finally:
        metrics_log.LIMIT = kept
    width = next(w for w in (1, 2, 4, 8) if len(numbers) <= 8 * w)
    rows = [np.array(numbers[i : i + width]) for i in range(0, len(numbers), width)]
    known = [row[~np.isnan(row)] for row in rows]
    assert points["x"] == [min(i + width, len(numbers)) for i in range(0, len(numbers), width)]
    for name, fold in {"y": np.mean, "low": np.min, "high": np.max}.items():
        if name in points or width > 1:
            got = [np.nan if value is None else value for value in points[name]]
            want = [fold(row) if len(row) else np.nan for row in known]
            assert got == pytest.approx(want, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_many_values_are_few_points_and_the_last_is_exact():
    series = Series()
    for start in range(0, 100_000, 7_000):
        steps = np.arange(start, min(start + 7_000, 100_000))
        series.add(steps, steps.astype(float))
    points = series.points(10**9)
    assert len(points["x"]) <= LIMIT and points["x"][-1] == 99_999
    assert points["low"][0] == 0 and points["high"][-1] == pytest.approx(99_999)
    assert series.summary()["last"] == 99_999 and series.summary()["first"] == 0
    assert len(series.points(10)["x"]) <= 10


def test_of_one_step_the_value_that_came_last_holds():
    series = Series()
    series.add(np.array([0, 5, 5]), np.array([1.0, 2.0, 3.0]))
    series.add(np.array([0, 6]), np.array([9.0, 4.0]))
    assert series.points(10) == {"x": [0, 5, 6], "y": [9.0, 3.0, 4.0]}
    assert series.summary()["first"] == 9.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def line(**row) -> str:
    return seal_line(row).decode() + "\n"


def lines(*steps: int) -> str:
    return "".join(line(step=s, loss=s / 2) for s in steps)


def test_a_growing_file_is_read_from_where_the_last_look_ended(path, monkeypatch):
    log = MetricsLog(path)
    assert log.read(1) and not log.series  # no file yet
    third = line(step=3, loss=7)
    path.write_text(lines(1, 2) + third[:15])
    assert log.read(1) and log.points(["loss"], 9)["loss"]["x"] == [1, 2]
    seen, parse = [], metrics_log.parse_lines
    monkeypatch.setattr(metrics_log, "parse_lines", lambda rows: seen.extend(rows) or parse(rows))
    with open(path, "a") as file:
        file.write(third[15:] + lines(4))
    before = log.version
    assert log.read(1) and log.version > before
    assert log.points(["loss"], 9)["loss"] == {"x": [1, 2, 3, 4], "y": [0.5, 1.0, 7.0, 2.0]}
    assert [json.loads(row)["step"] for row in seen] == [3, 4]
    assert log.read(1) and log.version == before + 1  # nothing new


def test_a_file_that_a_resumed_run_has_cut_is_read_anew(path, tmp_path):
    path.write_text(lines(1, 2, 3, 4))
    log = MetricsLog(path)
    log.read(1)
    (tmp_path / "new").write_text(lines(1, 2) + line(step=3, loss=8.0) + lines(4, 5))
    (tmp_path / "new").replace(path)
    log.read(1)
    assert log.points(["loss"], 9)["loss"]["y"] == [0.5, 1.0, 8.0, 2.0, 2.5]


def test_a_piece_at_a_time_is_the_whole(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "PIECE", 128)
    path.write_text(lines(*range(40)))
    log = MetricsLog(path)
    assert not log.read(1)
    while not log.read(1):
        pass
    assert log.points(["loss"], 99)["loss"]["x"] == list(range(40))


def test_what_is_no_line_of_metrics_is_counted_and_left_out(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "PIECE", 4096)
    bad = ["{", "3", '{"step": true, "a": 1}', '{"a": 1}', '{"step": -1}', "[" * 500, "x" * 9000]
    path.write_text(lines(1) + "\n".join(bad) + "\n" + lines(2))
    log = MetricsLog(path)
    while not log.read(1):
        pass
    assert list(log.series) == ["loss"] and log.points(["loss"], 9)["loss"]["x"] == [1, 2]
    assert log.damaged == len(bad)


def test_values_that_are_no_numbers_are_gaps_or_left_out(path):
    row = {"a": None, "b": "x", "c": True, "d": float("nan"), "e": 10**400, "f": 2}
    path.write_text(line(step=1, **row))
    log = MetricsLog(path)
    log.read(1)
    points = log.points("abcdef", 9)
    assert sorted(points) == ["a", "d", "f"] and log.damaged == 0
    assert points["a"]["y"] == [None] and points["d"]["y"] == [None] and points["f"]["y"] == [2.0]


def test_a_glance_knows_the_ends_of_a_long_file_without_its_middle(path, monkeypatch):
    monkeypatch.setattr(metrics_log, "HEAD", 200)
    monkeypatch.setattr(metrics_log, "TAIL", 400)
    base, last = line(step=0, **{"eval/a": 0.25}), line(step=90, **{"eval/a": 0.5})
    path.write_text(base + lines(*range(1, 91)) + last + lines(91))
    glance = Glance(path)
    glance.look()
    assert (glance.step, glance.latest) == (91, {"loss": 45.5})
    assert glance.base == {"eval/a": 0.25} and glance.held_out == {"eval/a": 0.5}
    with open(path, "a") as file:
        file.write(line(step=92, **{"eval/a": 0.75}))
    glance.look()
    assert (glance.step, glance.held_out_step, glance.held_out) == (92, 92, {"eval/a": 0.75})
    path.unlink()
    glance.look()
    assert glance.step is None and not glance.base


@pytest.mark.parametrize("piece", [128, 197, 4096])
def test_a_glance_looks_back_for_the_last_held_out_scores(path, monkeypatch, piece):
    monkeypatch.setattr(metrics_log, "HEAD", 100)
    monkeypatch.setattr(metrics_log, "TAIL", 100)
    monkeypatch.setattr(metrics_log, "PIECE", piece)
    base, last = line(step=0, **{"eval/a": 0.25}), line(step=20, **{"eval/a": 0.5})
    for before in range(20, 26):  # wherever the pieces' edges are
        path.write_text(base + lines(*range(1, before)) + last + lines(*range(before, 60)))
        glance = Glance(path)
        glance.look()
        assert (glance.step, glance.held_out) == (59, {"eval/a": 0.5}), before
        assert glance.base == {"eval/a": 0.25} and glance.latest == {"loss": 29.5}
    monkeypatch.setattr(metrics_log, "LOOK_BACK", 200)
    glance = Glance(path)
    glance.look()
    assert glance.held_out == glance.base


def test_held_out_scores_come_first():
    names = ["loss", "time/train", "reward/mean", "eval/b", "eval/20_steps/b", "other", "policy/kl"]
    assert held_out_first(names)[:3] == ["eval/b", "eval/20_steps/b", "reward/mean"]
    assert chosen_first(held_out_first(names)) == ["eval/b", "reward/mean", "policy/kl"]

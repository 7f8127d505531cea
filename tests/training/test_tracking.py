"""The record of a run survives crashes, holds each iteration once, and needs no network."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.training.tracking import FILE, Report, read_metrics
from flowrl.utils.journal import seal_line

LOG = [{"step": i, "reward/mean": i / 10} for i in range(1, 7)]


def lines(rows) -> str:
    return "".join(seal_line(row).decode() + "\n" for row in rows)


def test_numbers_are_on_disk_at_once_and_read_as_one_step(tmp_path):
    # A line is on disk as soon as it is logged.
    assert read_metrics(tmp_path) == []
    with Report(tmp_path, trackers=[]) as report:
        for row in LOG:
            report.log(row["step"], {"reward/mean": row["reward/mean"]})
            assert read_metrics(tmp_path)[-1] == row
    assert read_metrics(tmp_path) == LOG
    # Metrics logged at different times for one step are read as one.
    tmp_path = tmp_path / "again"
    with Report(tmp_path, trackers=[]) as report:
        report.log(2, {"reward/mean": 0.5})
        report.log(1, {"reward/mean": 0.1})
        report.log(2, {"grad/norm": 3.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.5, "grad/norm": 3.0},
    ]


def test_values_that_are_no_numbers_are_written_as_null(tmp_path):
    with Report(tmp_path) as report:
        for step, value in enumerate((math.nan, math.inf, -math.inf)):
            report.log(step, {"reward/mean": value, "grad/norm": 2.0})
    for step, line in enumerate((tmp_path / FILE).read_text().splitlines()):
        expected = {"step": step, "reward/mean": None, "grad/norm": 2.0}
        row = json.loads(line, parse_constant=pytest.fail)
        assert row.pop("digest") and row == expected
    assert step == 2


def test_resuming_cuts_what_comes_after_so_that_each_step_stands_once(tmp_path):
    for resume_step in [0, 3, 6, 9]:
        (tmp_path / FILE).write_text(lines(LOG))
        with Report(tmp_path, trackers=[], resume_step=resume_step) as report:
            for step in range(resume_step + 1, 12):
                report.log(step, {"reward/mean": -1.0})
        steps = [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]
        assert len(steps) == len(set(steps))
        new = [{"step": i, "reward/mean": -1.0} for i in range(resume_step + 1, 12)]
        assert read_metrics(tmp_path) == LOG[:resume_step] + new


@given(cut=st.integers(1, len(lines(LOG))))
def test_wherever_a_crash_cuts_the_file_resuming_repairs_it(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    text = lines(LOG)[:cut]
    (folder / FILE).write_text(text)
    whole = text.count("}")
    assert read_metrics(folder) == LOG[:whole]
    with Report(folder, trackers=[], resume_step=len(LOG)) as report:
        report.log(99, {"reward/mean": 0.5})
    assert read_metrics(folder) == [*LOG[:whole], {"step": 99, "reward/mean": 0.5}]


def test_tensorboard_keeps_the_numbers_and_a_resumed_run_hides_what_it_repeats(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    with Report(tmp_path) as report:
        for step in (1, 2, 3):
            report.log(step, {"reward/mean": step / 4, "grad/norm": math.nan})
    with Report(tmp_path, resume_step=2) as report:
        report.log(3, {"reward/mean": 0.125})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.125)]

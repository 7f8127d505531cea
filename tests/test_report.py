"""The record of a run survives crashes, holds each iteration once, and needs no network."""

import importlib.util
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.errors import UserError
from flowrl.training.tracking import FILE, Report, read_metrics

LOG = [{"step": i, "reward/mean": i / 10} for i in range(1, 7)]


def write(folder, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(text, encoding="utf-8")


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    with Report(tmp_path, trackers=[]) as report:
        for row in LOG:
            report.log(row["step"], {"reward/mean": row["reward/mean"]})
            assert read_metrics(tmp_path)[-1] == row
    assert read_metrics(tmp_path) == LOG


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_written_as_null(tmp_path, value):
    with Report(tmp_path) as report:
        report.log(1, {"reward/mean": value, "grad/norm": 2.0})
    text = (tmp_path / FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "reward/mean": None,
        "grad/norm": 2.0,
    }


@pytest.mark.parametrize("resume_step", [0, 3, 6, 9])
def test_resuming_cuts_what_comes_after_so_that_each_step_stands_once(tmp_path, resume_step):
    write(tmp_path, lines(LOG))
    with Report(tmp_path, trackers=[], resume_step=resume_step) as report:
        for step in range(resume_step + 1, 12):
            report.log(step, {"reward/mean": -1.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(steps) == len(set(steps))
    new = [{"step": i, "reward/mean": -1.0} for i in range(resume_step + 1, 12)]
    assert read_metrics(tmp_path) == LOG[:resume_step] + new


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(1, len(lines(LOG))))
def test_wherever_a_crash_cuts_the_file_resuming_repairs_it(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    text = lines(LOG)[:cut]
    write(folder, text)
    whole = text.count("}")
    assert read_metrics(folder) == LOG[:whole]
    with Report(folder, trackers=[], resume_step=len(LOG)) as report:
        report.log(99, {"reward/mean": 0.5})
    assert read_metrics(folder) == [*LOG[:whole], {"step": 99, "reward/mean": 0.5}]


def test_a_broken_line_in_the_middle_is_named_not_skipped(tmp_path):
    write(tmp_path, lines(LOG[:2]) + '{"step": \n' + lines(LOG[3:]))
    with pytest.raises(UserError, match="line 3"):
        read_metrics(tmp_path)


def test_a_new_run_does_not_write_into_the_metrics_of_another(tmp_path):
    write(tmp_path, lines(LOG))
    with pytest.raises(UserError, match="earlier run"):
        Report(tmp_path, trackers=[])
    assert read_metrics(tmp_path) == LOG


def test_metrics_logged_at_different_times_for_one_step_are_read_as_one(tmp_path):
    with Report(tmp_path, trackers=[]) as report:
        report.log(2, {"reward/mean": 0.5})
        report.log(1, {"reward/mean": 0.1})
        report.log(2, {"grad/norm": 3.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.5, "grad/norm": 3.0},
    ]


def test_a_folder_without_metrics_reads_as_no_steps(tmp_path):
    assert read_metrics(tmp_path) == []


def test_samples_are_a_sheet_of_the_pictures_rounded_to_bytes(tmp_path):
    images = torch.zeros(3, 3, 64, 64)
    images[1] = torch.tensor([0.6, 0.2, 1.7])[:, None, None]
    with Report(tmp_path, trackers=[]) as report:
        path = report.images(25, images, ["a", "b", "c"])
    assert path == tmp_path / "samples" / "step-000025.png"
    with Image.open(path) as sheet:
        colors = sheet.convert("RGB").getcolors(1 << 20) or []
    assert (192 * 192, (153, 51, 255)) in colors


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


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_says_how_to_get_it(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(UserError, match=f"pip install {name}"):
        Report(tmp_path, trackers=[name])


def test_an_unknown_tracker_names_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="tensorboard, wandb, trackio"):
        Report(tmp_path, trackers=["mlflow"])

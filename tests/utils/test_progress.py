"""Without a terminal, progress is plain lines that say how far a job is."""

import io

from rich.console import Console

from flowrl.utils import progress
from flowrl.utils.progress import Steps


def run(**values) -> list[str]:
    out = io.StringIO()
    with Steps("train", 5, start=2, console=Console(file=out)) as steps:
        for _ in range(3):
            steps.advance(values)
    return out.getvalue().splitlines()


def test_the_time_that_is_left_is_that_of_the_steps_after_the_slow_first_one(monkeypatch):
    times = iter([0.0, 100.0, 110.0, 120.0])
    monkeypatch.setattr("flowrl.utils.progress.time.monotonic", lambda: next(times))
    monkeypatch.setattr(progress, "EVERY", 0)
    out = io.StringIO()
    steps = Steps("train", 5, console=Console(file=out))
    for _ in range(3):
        steps.advance()
    assert out.getvalue().splitlines()[1:] == [
        "train 2/5 1:50 (left 0:30)", "train 3/5 2:00 (left 0:20)",
    ]  # fmt: skip


def test_each_line_says_the_step_the_time_and_the_values(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0)
    lines = run(reward=0.5, kl=None, skipped=2)
    assert [line.split()[1] for line in lines] == ["3/5", "4/5", "5/5"]
    assert lines[-1] == "train 5/5 0:00 (left 0:00) reward 0.500 kl n/a skipped 2"
    # Between the first and the last line there is silence for a while.
    monkeypatch.setattr(progress, "EVERY", 1000)
    assert [line.split()[1] for line in run()] == ["3/5", "5/5"]

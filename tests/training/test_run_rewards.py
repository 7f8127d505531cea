"""A run whose reward dies in the middle: it stops in time, says why, and goes on later."""

import threading
import time
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.scoring.executors.base import RewardFailure
from flowrl.training.checkpoint import STATE
from flowrl.training.tracking import read_metrics

STICKY = '''
import time
from pathlib import Path


class Sticky:
    """Brightness, until the file `stuck` is there; then no answer."""

    bounds = (0, 1)

    def __init__(self, stuck):
        self.stuck = Path(stuck)

    def __call__(self, images, prompts, metadata):
        while self.stuck.exists():
            time.sleep(0.1)
        return images.mean((1, 2, 3))
'''


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(executor, name, args):
        return tiny_config(
            rewards=[{"name": name, "args": args, "executor": executor}],
            run={"iterations": 40, "checkpoint_every": 50, "output_dir": str(tmp_path / "run")},
        )

    return make


def when_iterations_are(count: int, folder: Path, act) -> threading.Thread:
    """Do something to a run in its middle, from outside."""

    def wait() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) >= count:
                return act()
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def assert_saved_where_it_stopped(folder: Path) -> int:
    """-> the iteration."""
    last = read_metrics(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:06d}" / STATE).exists()
    return last


def test_a_run_survives_a_process_that_hangs(config_for, load_tiny, tmp_path, monkeypatch):
    (tmp_path / "sticky.py").write_text(STICKY)
    monkeypatch.syspath_prepend(tmp_path)
    stuck, folder = tmp_path / "stuck", tmp_path / "run"
    pool = {"kind": "pool", "timeout": 1, "micro_batch": None}
    config = config_for(pool, name="sticky:Sticky", args={"stuck": str(stuck)})
    when_iterations_are(2, folder, stuck.touch)
    with pytest.raises(RewardFailure, match=r"took longer than 1 s and was stopped"):
        align(config, pipeline=load_tiny())
    assert_saved_where_it_stopped(folder)

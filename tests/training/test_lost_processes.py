"""Two real processes of one run, of which one is slow, frozen, killed or fails."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from crashes import SMALLEST

from flowrl.config import config_yaml
from flowrl.training.checkpoint import STATE, Checkpoints
from flowrl.utils.files import load_state

# What rank `victim` does in its reward once a first checkpoint is there. The group's own timeout
# is cut short: nothing but gradients may depend on it.
SCRIPT = """
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
from flowrl.api import align
from flowrl.cli import report_errors
from flowrl.config import load_config
from flowrl.utils import peers

does, victim, config = sys.argv[1], int(sys.argv[2]), load_config(Path(sys.argv[3]))
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
peers.GRACE = 2.0
first = Path(config.run.output_dir) / "checkpoints/step-000001/state.safetensors"
once = [first]


def mine(images, prompts, metadata):
    if dist.get_rank() == victim and once and first.exists():
        once.clear()
        if does == "hangs":
            time.sleep(1000)
        if does == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "fills":
            raise MemoryError
        if does == "breaks":
            raise SystemError
    return images.mean((1, 2, 3))


if does in ("fills", "breaks"):  # in flowrl's own code, where a reward's error is none
    from flowrl.scoring.executors import base

    asked = base.ask
    def ask(reward, name, images, prompts, metadata):
        mine(images, prompts, metadata)
        return asked(reward, name, images, prompts, metadata)
    base.ask = ask
report_errors(lambda: align(config, rewards={"mine": mine}), debug=False)
"""


@pytest.fixture
def start(launch, tiny_config, tmp_path):
    """Start both processes of a run, of which `victim` does something."""

    def begin(does: str, victim: int = 1, **runtime: float) -> list[subprocess.Popen]:
        config = tiny_config(
            rollout=SMALLEST | {"prompts_per_iteration": 2},
            run={"iterations": 3, "keep_checkpoints": 5, "output_dir": str(tmp_path / "run")},
            runtime=runtime,
        )
        (tmp_path / "config.yaml").write_text(config_yaml(config))
        (tmp_path / "script.py").write_text(SCRIPT)
        return launch(tmp_path / "script.py", does, victim, tmp_path / "config.yaml")

    return begin


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


def saved(folder: Path) -> int:
    """The iterations of the newest checkpoint, which is whole."""
    run = Checkpoints(folder / "run", keep=5)
    newest = run.steps()[-1]
    assert load_state(run.path(newest) / STATE)["iteration"] == newest
    return newest


@pytest.mark.slow
@pytest.mark.parametrize("does", ["hangs", "stops", "dies", "breaks"])
def test_a_lost_process_is_named_and_the_first_one_saves(start, tmp_path, does):
    timeout = 1800.0 if does in ("dies", "breaks") else 20.0  # noticed at once
    first, second = start(does, timeout=timeout)
    code, output = ended(first)
    assert code == 75, output
    assert "rank 1" in output and "A process is lost" in output
    assert "step-000001, after 1 of 3" in output and saved(tmp_path) == 1
    if does == "breaks":
        code, output = ended(second)
        assert code == 1 and "SystemError" in output and "not expected" in output


@pytest.mark.slow
def test_a_frozen_first_process_ends_the_others(start, tmp_path):
    code, output = ended(start("stops", 0, timeout=20.0)[1])
    assert code == 75 and "rank 0" in output, output


@pytest.mark.slow
def test_sigterm_ends_a_process_that_waits_for_a_frozen_one(start, tmp_path):
    first, second = start("stops")
    until = time.monotonic() + 300
    while not stopped(second.pid) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)
    first.send_signal(signal.SIGTERM)
    code, output = ended(first)
    assert code == 143, output
    assert "SIGTERM while it waited" in output and "step-000001" in output
    assert saved(tmp_path) == 1


def stopped(number: int) -> bool:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_out_of_memory_on_one_process_ends_both_with_one_sentence(start, tmp_path):
    for process in start("fills"):
        code, output = ended(process)
        assert code == 1, output
        assert "rank 1: out of memory in phase score (reward 'mine')" in output
    assert saved(tmp_path) == 1

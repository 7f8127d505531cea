"""Processes of a pool and the script that started them: they run none of it, and end with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent

# A script without `if __name__ == "__main__":`, as people write them.
SCRIPT = """
import os, sys, time
import torch
from flowrl.config.rewards import PoolOptions
from flowrl.scoring.executors.pool import PoolExecutor

with open(sys.argv[1], "a") as file:
    file.write("script\\n")
sys.path.insert(0, sys.argv[2])
pool = PoolExecutor("pool_rewards:write_process_id", {}, "r", PoolOptions(workers=2, micro_batch=1))
pool.submit(torch.zeros(2, 3, 8, 8), ["p"] * 2, [{"path": sys.argv[1]}] * 2)
while open(sys.argv[1]).read().count("\\n") < 3:
    time.sleep(0.05)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path) -> Iterator[Callable[[], tuple[subprocess.Popen, list[int]]]]:
    """Run SCRIPT until both its processes hang in their rewards. -> it, their ids."""
    started: list[subprocess.Popen] = []
    seen = tmp_path / "seen"

    def run() -> tuple[subprocess.Popen, list[int]]:
        (tmp_path / "script.py").write_text(SCRIPT)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(seen), str(HERE)],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        first, *ids = seen.read_text().split()
        assert first == "script"  # and it ran once: the processes did not run it again
        return process, [int(number) for number in ids]

    yield run
    for process in started:
        process.kill()
        process.wait()


def ended(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_processes_end_when_the_one_that_started_them_is_killed(script):
    process, ids = script()
    assert not any(ended(number) for number in ids)
    process.kill()
    assert within(10, lambda: all(ended(number) for number in ids))


@pytest.mark.slow
def test_ctrl_c_is_the_parents_to_handle_and_an_end_without_close_leaves_none(script):
    process, ids = script()
    for number in ids:
        os.kill(number, signal.SIGINT)
    assert not within(0.5, lambda: any(ended(number) for number in ids))
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: all of them get it
    assert process.wait(20) != 0
    assert within(5, lambda: all(ended(number) for number in ids))

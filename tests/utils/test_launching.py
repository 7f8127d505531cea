"""`flowrl train --gpus N`: how its processes are started, told to stop, and how they end."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from flowrl.errors import UserError
from flowrl.utils import launching
from flowrl.utils.launching import check_no_launcher, count_processes, run_processes
from flowrl.utils.peers import meet


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, sys, time; rank = os.environ['RANK']; {text}"]


def test_each_process_knows_its_place_and_where_the_others_are(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ACCELERATE_USE_CPU"
    told = f"' '.join(os.environ[n] for n in '{names}'.split())"
    text = f"open(r'{tmp_path}/' + rank, 'w').write({told})"
    assert run_processes(program(text), 2, cpu=True) == 0
    first, second = ((tmp_path / rank).read_text().split() for rank in "01")
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"] and first[6] == "true"
    assert second[:2] == ["1", "1"] and second[2:] == first[2:] and int(first[5]) > 1023


def test_the_first_failure_is_the_exit_code_and_ends_those_that_do_not_end(monkeypatch):
    monkeypatch.setattr(launching, "PATIENCE", 0.3)
    # Rank 1 fails at once; rank 0 would end with another code when it is told to, else not at all.
    wait = "import signal; signal.signal(15, lambda *_: os._exit(7)); time.sleep(600)"
    text = f"sys.exit(5) if rank == '1' else exec({wait!r})"
    assert run_processes(program(text), 2, cpu=True) == 5
    assert run_processes(program("os.kill(os.getpid(), 9)"), 1, cpu=True) == 137


def test_a_signal_reaches_each_process_once(tmp_path):
    ready = [tmp_path / f"ready-{rank}" for rank in "01"]
    said = "open(r'{}/' + name + '-' + rank, 'a').write('x')"
    # The first to end takes the others with it: each waits until both have written.
    both = f"all(os.path.exists('{tmp_path}/got-' + r) for r in '01')"
    wait_for_both = f"[time.sleep(0.01) for _ in iter(lambda: {both}, True)]"
    got = "; ".join(
        ("name = 'got'", said.format(tmp_path), wait_for_both, "time.sleep(0.3)", "os._exit(3)")
    )
    wait = f"import signal; signal.signal(2, lambda *_: exec({got!r})); name = 'ready'; "
    text = f"exec({wait + said.format(tmp_path) + '; time.sleep(600)'!r})"

    def interrupt():
        while not all(path.exists() for path in ready):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert run_processes(program(text), 2, cpu=True) == 3
    assert [(tmp_path / f"got-{rank}").read_text() for rank in "01"] == ["x", "x"]


def test_ranks_listen_on_loopback_alone_and_end_with_a_killed_launcher():
    rank = """
import os, time, torch.distributed as dist
from flowrl.utils.launching import end_with_launcher
end_with_launcher()
dist.init_process_group("gloo")
dist.barrier()
os.write(1, b"ready\\n")  # at once, so that lines of two processes stay whole
time.sleep(600)
"""
    launch = (
        "import sys; from flowrl.utils.launching import run_processes; "
        f"run_processes([sys.executable, '-c', {rank!r}], 2, cpu=True)"
    )
    launcher = psutil.Popen([sys.executable, "-c", launch], stdout=subprocess.PIPE)
    try:
        assert [launcher.stdout.readline() for _ in "01"] == [b"ready\n"] * 2
        ranks = launcher.children()
        listening = {
            connection.laddr.ip
            for process in [launcher, *ranks]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
    finally:
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_as_many_processes_as_gpus_or_fewer_and_without_any_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert count_processes("auto", device="auto") == (4, False)
    assert count_processes("2", device="cuda") == (2, False)
    assert count_processes("8", device="cpu") == (8, True)
    with pytest.raises(UserError, match="--gpus is 5, but torch finds 4"):
        count_processes("5", device="auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert count_processes("auto", device="auto") == (1, True)
    assert count_processes("2", device="auto") == (2, True)
    with pytest.raises(UserError, match="but torch finds 0"):
        count_processes("2", device="cuda")
    for wrong in ("0", "-1", "all", ""):
        with pytest.raises(UserError, match="expected auto or a number"):
            count_processes(wrong, device="auto")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="a launcher has started this one already"):
        check_no_launcher("--gpus")


def test_processes_meet_those_of_their_own_attempt_in_a_store_of_several():
    store = dist.HashStore()
    names = set()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            later = [pool.submit(meet, store, rank, 3) for rank in (1, 2)]
            time.sleep(0.1)  # in which they find only what an earlier attempt has left
            met = {pool.submit(meet, store, 0, 3).result(60), *(f.result(60) for f in later)}
        assert len(met) == 1 and not met & names
        names |= met

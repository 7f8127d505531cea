"""Workers through Ray: on this machine, and in network namespaces where processes and links fail.

Ray's start alone takes seconds, so that all of it is slow; `test_workers.py` does without Ray.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flowrl.api import align
from flowrl.backbones.lora_files import FILE
from flowrl.config import config_yaml
from flowrl.training.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHORT = {"prompts_per_iteration": 3, "group_size": 4, "num_inference_steps": 3, "batch_size": 4}
ACTOR = "ray::RayActor"  # as Ray names a worker's process


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(name: str, workers: dict | None, iterations: int = 3, **changes):
        rollout = SHORT | changes.pop("rollout", {}) | {"workers": workers}
        run = {"iterations": iterations, "checkpoint_every": 99, "sample_every": 0, "trackers": [],
               "output_dir": str(tmp_path / name), "threads": 1}  # fmt: skip
        return tiny_config(rollout=rollout, run=run, **changes)

    return make


def weights(folder: Path) -> bytes:
    return (folder / FILE).read_bytes()


def workers_of(parent: psutil.Process) -> list[psutil.Process]:
    """The processes of workers below one."""
    found = []
    for process in parent.children(recursive=True):
        try:
            if process.cmdline()[:1] == [ACTOR] or process.name().startswith(ACTOR):
                found.append(process)
        except psutil.Error:
            continue
    return found


CASES = {
    "grpo": {},
    "nft": {"objective": {"kind": "nft", "noising": {"count": 2}},
            "rollout": {"tree": {"kind": "ode"}}},
    "tree": {"objective": {"kind": "grpo", "kl_coef": 0.1},
             "rollout": {"tree": {"kind": "branch_grpo", "splits": [0]}}},
    "two_stage": {"rollout": {"explore": {
        "candidates": 6, "num_inference_steps": 2, "precision": "nvfp4-emulated", "min_dim": 0,
        "audit": {"every": 1, "prompts": 1, "min_rho": -1}}}},
    "late": {"rollout": {"staleness": 1}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_runs_with_ray_on_this_machine_have_the_weights_of_one_process(config_for, tmp_path, case):
    align(config_for("here", None, **CASES[case]))
    align(config_for("ray", {"count": 2}, **CASES[case]))
    assert weights(tmp_path / "ray") == weights(tmp_path / "here")
    last = read_metrics(tmp_path / "ray")[-1]
    assert last["workers/0/units"] > 0 and last["workers/0/failures"] == 0
    assert not workers_of(psutil.Process()), "Ray ends with the run"


def test_workers_that_are_killed_in_a_run_change_nothing(config_for, tmp_path):
    align(config_for("here", None, 6))
    killed: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        seen: set[int] = set()
        while not ended.wait(1.0) and len(killed) < 3:
            new = [p for p in workers_of(psutil.Process()) if p.pid not in seen]
            lines = read_metrics(tmp_path / "ray")
            if new and lines and lines[-1].get("workers/joined"):
                seen |= {p.pid for p in new}
                new[0].send_signal(signal.SIGKILL)
                killed.append(new[0].pid)

    thread = threading.Thread(target=kill)
    thread.start()
    align(config_for("ray", {"count": 2}, 6))
    ended.set()
    thread.join()
    assert killed and weights(tmp_path / "ray") == weights(tmp_path / "here")
    assert sum(read_metrics(tmp_path / "ray")[-1][f"workers/{i}/failures"] for i in (0, 1)) > 0


# --- network namespaces --------------------------------------------------------------------------

NET = f"198.51.100.{'{}'}"  # addresses that documentation is free to use
QUICK = {  # Ray's own looks for machines that are gone
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "7" * 64,
}


def lacks_namespaces() -> str:
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip and unshare"
    name = f"flowrl-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


class Machines:
    """A head and worker machines as network namespaces on one bridge; no folder is shared."""

    def __init__(self, folder: Path, workers: int):
        self.folder, self.names = folder, [f"flw{os.getpid()}n{i}" for i in range(workers + 1)]
        self.running: dict[int, subprocess.Popen] = {}
        self.wanted: set[int] = set()
        head = self.names[0]
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip("-n", head, "link", "add", "bridge", "type", "bridge")
        self.ip("-n", head, "addr", "add", NET.format(1) + "/24", "dev", "bridge")
        self.ip("-n", head, "link", "set", "bridge", "up")
        for i in range(1, workers + 1):
            self.ip("link", "add", f"to{i}", "netns", head, "type", "veth",
                    "peer", "name", "out", "netns", self.names[i])  # fmt: skip
            self.ip("-n", head, "link", "set", f"to{i}", "master", "bridge", "up")
            self.ip("-n", self.names[i], "addr", "add", NET.format(i + 1) + "/24", "dev", "out")
            self.ip("-n", self.names[i], "link", "set", "out", "up")

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def command(self, i: int, *words: str, hide: bool = True) -> list[str]:
        """A command in a namespace; hide: what the others write lies under another mount."""
        inside = ["ip", "netns", "exec", self.names[i]]
        if not hide:
            return [*inside, *words]
        hidden = [str(self.folder), f"/dev/shm/{self.names[0]}"]  # of the trainer, of Ray's head
        own = " && ".join(f"mount -t tmpfs none {folder}" for folder in hidden)
        return [*inside, "unshare", "-m", "sh", "-c", f'{own} && exec "$@"', "sh", *words]

    def start(self, i: int, cpus: int = 1) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
               "--disable-usage-stats", "--object-store-memory", "200000000",
               "--node-ip-address", NET.format(i + 1)]  # fmt: skip
        ray += (
            ["--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false"]
            if i == 0
            else ["--address", NET.format(1) + ":6379", "--num-cpus", str(cpus)]
        )
        # Sockets have short paths; a folder of its own for each machine.
        ray += ["--temp-dir", f"/dev/shm/{self.names[i]}"] if i == 0 else []
        self.wanted.add(i)
        self.running[i] = subprocess.Popen(
            self.command(i, *ray, hide=i > 0), env=os.environ | QUICK, cwd=self.folder.parent,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def keep(self) -> None:
        """Start machines again whose Ray has ended, as a supervisor does."""
        for i, process in list(self.running.items()):
            if i in self.wanted and i > 0 and process.poll() is not None:
                self.stop(i)
                self.start(i)

    def link(self, i: int, state: str) -> None:
        self.ip("-n", self.names[0], "link", "set", f"to{i}", state)

    def workers(self) -> list[psutil.Process]:
        return [p for i in self.running for p in workers_of(psutil.Process(self.running[i].pid))]

    def stop(self, i: int) -> None:
        """End everything in a namespace, as when its machine loses power."""
        self.wanted.discard(i)
        process = self.running.pop(i)
        listed = subprocess.run(["ip", "netns", "pids", self.names[i]], capture_output=True)
        for pid in listed.stdout.split():
            if i > 0 or int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for i in sorted(self.running, reverse=True):
            self.stop(i)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(f"/dev/shm/{self.names[0]}", ignore_errors=True)


@pytest.fixture
def machines(tmp_path):
    if why := lacks_namespaces():
        pytest.skip(why)
    (tmp_path / "shared").mkdir()
    made = Machines(tmp_path / "shared", 2)
    yield made
    made.close()


class Trainer:
    """`flowrl train` in the head's namespace."""

    def __init__(self, machines: Machines, config, folder: Path):
        self.folder = Path(config.run.output_dir)
        recipe = folder / "recipe.yaml"
        recipe.write_text(config_yaml(config))
        self.log = open(folder / "train.log", "w")
        self.process = subprocess.Popen(
            machines.command(0, sys.executable, "-m", "flowrl", "train", str(recipe), hide=False),
            stdout=self.log, stderr=subprocess.STDOUT,
            env=os.environ | QUICK | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def lines(self) -> list[dict]:
        return read_metrics(self.folder)

    def at_work(self) -> bool:
        return self.process.poll() is None


def started(machines, iterations, config_for, folder, count, **changes) -> Trainer:
    address = NET.format(1) + ":6379"
    workers = {"count": count, "address": address, "timeout": 60.0}
    config = config_for("shared/remote", workers, iterations, **changes)
    return Trainer(machines, config, folder)


def wait_for(what, machines: Machines, trainer: Trainer, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while trainer.at_work() and not what():
        assert time.monotonic() < until, Path(trainer.log.name).read_text()[-3000:]
        machines.keep()
        time.sleep(0.2)


def test_twenty_deaths_and_cut_links_between_machines_change_nothing(
    config_for, machines, tmp_path
):
    iterations = 60
    align(config_for("here", None, iterations))
    for i in (0, 1, 2):
        machines.start(i, cpus=1)
        time.sleep(5.0 if i == 0 else 0.5)
    trainer = started(machines, iterations, config_for, tmp_path, 2)
    wait_for(lambda: len(trainer.lines()) >= 1, machines, trainer)
    rng, events = random.Random(0), []
    while trainer.at_work() and len(events) < 20:
        before = len(trainer.lines())
        victims = machines.workers()
        if rng.random() < 0.6 and victims:
            rng.choice(victims).send_signal(signal.SIGKILL)
            events.append("kill")
        else:
            cut, seconds = rng.choice((1, 2)), rng.uniform(1.0, 8.0)
            machines.link(cut, "down")
            time.sleep(seconds)
            machines.link(cut, "up")
            events.append(f"cut {seconds:.0f} s")
        wait_for(lambda b=before: len(trainer.lines()) >= b + 2, machines, trainer)
    wait_for(lambda: False, machines, trainer, 600.0)
    said = Path(trainer.log.name).read_text()
    assert trainer.process.wait() == 0, said[-3000:]
    assert len(events) == 20, (len(events), said[-3000:])
    print(json.dumps(events), said[-1500:])
    assert weights(tmp_path / "shared/remote") == weights(tmp_path / "here")


def test_one_three_and_again_one_worker_change_nothing(config_for, machines, tmp_path):
    iterations = 50
    waits = [{"name": "flowrl.bench.reward:Waiting", "args": {"seconds": 0.1}}]  # time to join
    align(config_for("here", None, iterations, rewards=waits))
    machines.start(0)
    time.sleep(5.0)
    machines.start(1, cpus=1)
    trainer = started(machines, iterations, config_for, tmp_path, 3, rewards=waits)
    seen: list[float] = []

    def joined(number: int) -> bool:
        seen.extend(line["workers/joined"] for line in trainer.lines()[len(seen) + 1 :])
        return bool(seen) and seen[-1] == number

    wait_for(lambda: joined(1), machines, trainer)
    machines.start(2, cpus=2)
    wait_for(lambda: joined(3), machines, trainer)
    machines.stop(2)
    wait_for(lambda: joined(1), machines, trainer)
    wait_for(lambda: False, machines, trainer, 600.0)
    assert trainer.process.wait() == 0, Path(trainer.log.name).read_text()[-3000:]
    assert seen[0] == 1 and 3 in seen and seen[-1] == 1, seen
    print(seen)
    assert weights(tmp_path / "shared/remote") == weights(tmp_path / "here")

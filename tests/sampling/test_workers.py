"""Rollout workers through Ray: whoever samples, dies or freezes, the bits of one process."""

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import psutil
import pytest

from flowrl.api import align
from flowrl.assembly.learner import ProvidedObjects
from flowrl.assembly.worker import Worker, build_pool
from flowrl.backbones.lora_files import FILE
from flowrl.config import config_yaml
from flowrl.errors import MachineFailure, UserError, exit_code
from flowrl.sampling.workers import WorkerPool
from flowrl.training.tracking import read_metrics
from flowrl.utils.distributed import Runtime

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
SHORT = {"prompts_per_iteration": 3, "group_size": 4, "num_inference_steps": 3, "batch_size": 4}
CASES = {
    "grpo": {},
    "nft": {"objective": {"kind": "nft", "noising": {"count": 2}},
            "rollout": {"tree": {"kind": "ode"}}},
    "tree": {"objective": {"kind": "grpo", "kl_coef": 0.1},
             "rollout": {"tree": {"kind": "branch_grpo", "splits": [0]}}},
    "two_stage": {"rollout": {"explore": {
        "candidates": 6, "num_inference_steps": 2, "precision": "nvfp4-emulated",
        "audit": {"every": 1}}}, "pipeline": {"min_dim": 0}},
    "pruned": {"rollout": {"num_inference_steps": 4, "explore": {
        "candidates": 6, "num_inference_steps": None, "stop_at": 2, "precision": "bf16",
        "audit": {"every": 1}}}},
    "late": {"rollout": {"staleness": 1}},
    "whole_groups": {"rewards": [{"name": "brightness"}, {"name": "diversity", "weight": 0.1}]},
}  # fmt: skip


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(name: str, workers: dict | None, iterations: int = 3, **changes):
        rollout = SHORT | changes.pop("rollout", {}) | {"workers": workers}
        run = {"iterations": iterations, "checkpoint_every": 99, "sample_every": 0, "trackers": [],
               "output_dir": str(tmp_path / name), "threads": 1}  # fmt: skip
        return tiny_config(rollout=rollout, run=run, **changes)

    return make


@pytest.fixture
def same(tmp_path):
    """Whether the runs `here` and `ray` ended with the same bits."""
    return lambda: (tmp_path / "ray" / FILE).read_bytes() == (tmp_path / "here" / FILE).read_bytes()


def workers_of(parent: psutil.Process) -> list[psutil.Process]:
    """The processes of workers below one."""
    return [p for p in parent.children(recursive=True) if _command(p).startswith("ray::Worker")]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "grpo"]
)
def test_a_run_with_workers_has_the_weights_of_one_process(config_for, same, case):
    align(config_for("here", None, **CASES[case]))
    align(config_for("ray", {"count": 2}, **CASES[case]))
    assert same()


def test_a_worker_that_is_killed_changes_no_bit(config_for, same, tmp_path, monkeypatch):
    align(config_for("here", None))
    submit, submitted = WorkerPool.submit, []

    def then_kill(pool, jobs, name):
        pending = submit(pool, jobs, name)
        submitted.append(name)
        if len(submitted) == 2:
            (worker,) = workers_of(psutil.Process())
            worker.kill()
        return pending

    monkeypatch.setattr(WorkerPool, "submit", then_kill)
    align(config_for("ray", {"count": 1}))
    assert same()
    last = read_metrics(tmp_path / "ray")[-1]
    assert last["workers/restarts"] >= 1 and last["workers/joined"] >= 1
    assert not workers_of(psutil.Process()), "Ray ends with the run"


@pytest.mark.slow
def test_a_frozen_worker_ends_the_run_with_its_name(config_for, tmp_path):
    def freeze() -> None:
        while not read_metrics(tmp_path / "ray"):  # Ray starts slowly on a busy machine
            time.sleep(0.1)
        workers_of(psutil.Process())[0].suspend()

    frozen = threading.Thread(target=freeze)
    frozen.start()
    with pytest.raises(MachineFailure, match=r"worker \d \(.*process \d+\)") as failure:
        align(config_for("ray", {"count": 2}, 99, runtime={"timeout": 20.0}))
    frozen.join()
    assert exit_code(failure.value) == 75 and "runtime.timeout" in str(failure.value)


@pytest.mark.slow
def test_a_worker_on_another_kind_of_machine_gets_no_work(config_for, monkeypatch):
    class Other(Worker):
        def __init__(self, recipe, threads, like):
            super().__init__(recipe, threads, f"another GPU, {like}")

    config = config_for("ray", {"count": 1})
    monkeypatch.setattr("flowrl.assembly.worker.Worker", Other)
    with pytest.raises(UserError, match="worker 0 .* and the trainer another GPU"):
        align(config)


@pytest.mark.slow
def test_ray_listens_on_loopback_and_a_killed_trainer_leaves_no_worker(config_for, tmp_path):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "ray"
    recipe.write_text(config_yaml(config_for("ray", {"count": 1}, 999)))
    command = [sys.executable, "-m", "flowrl", "train", str(recipe)]
    log = (tmp_path / "log").open("w")
    trainer = psutil.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        while trainer.poll() is None and not read_metrics(folder):
            time.sleep(0.2)
        assert trainer.poll() is None, (tmp_path / "log").read_text()
        processes = [trainer, *trainer.children(recursive=True)]
        heard = {c.laddr.ip for p in processes for c in _connections(p) if c.status == "LISTEN"}
        assert heard and heard <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, heard
        workers = workers_of(trainer)
        assert workers
    finally:
        trainer.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def _connections(process: psutil.Process) -> list:
    try:
        return process.net_connections("inet")
    except psutil.Error:
        return []


def test_objects_that_workers_could_not_load_are_refused(config_for):
    runtime = Runtime(device="cpu")
    for provided in (ProvidedObjects(pipeline=object()), ProvidedObjects(rewards={"r": len})):
        with pytest.raises(UserError, match="rollout.workers"):
            build_pool(config_for("ray", {"count": 1}), runtime, provided)
    assert build_pool(config_for("ray", None), runtime, ProvidedObjects()) is None

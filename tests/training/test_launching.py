"""`flowrl` as several processes: started by itself, by launchers, and without a shared disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_servers import free_port
from crashes import SMALLEST

from flowrl.backbones.lora_files import FILE
from flowrl.config import config_yaml
from flowrl.training.checkpoint import Checkpoints
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import load_state

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Brightness; each rank of KILLS ends by SIGKILL once, when there are so many checkpoints.
REWARD = """
import os
import signal
from pathlib import Path


def bright(images, prompts, metadata):
    for pair in os.environ.get("KILLS", "").split():
        rank, step = map(int, pair.split(":"))
        home = Path(os.environ["HOME_OF_RUN"])
        run = os.environ["RUN"]
        done = home / f"disk-0/{run}/checkpoints/step-{step:06d}/state.safetensors"
        sign = home / f"{run}-{pair}"
        if int(os.environ["RANK"]) == rank and done.exists() and not sign.exists():
            sign.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return images.mean((1, 2, 3))
"""

# `flowrl` on a disk of this process's own.
PROGRAM = """
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
disk = Path(os.environ["HOME_OF_RUN"]) / f"disk-{os.environ['RANK']}"
disk.mkdir(exist_ok=True)
os.chdir(disk)
from flowrl.cli import main

main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def home(tiny_config, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("launching")
    (made / "kills.py").write_text(REWARD)
    (made / "program.py").write_text(PROGRAM)
    config = tiny_config(
        # merge_lora is what a network in parts cannot.
        rollout=SMALLEST | {"prompts_per_iteration": 3, "batch_size": 3, "merge_lora": False},
        rewards=[{"name": "kills:bright"}],
        optim={"lr": 1e-3, "micro_batch": 3},
        ema={"decay": 0.5},
        evaluation={"prompts": "tiny:colors:test", "num_images": 3, "num_inference_steps": 2},
        run={"iterations": 3, "checkpoint_every": 1, "keep_checkpoints": 9, "sample_every": 0},
    )
    (made / "recipe.yaml").write_text(config_yaml(config))
    return made


def flowrl(home: Path, *words: object, launcher: tuple[str, ...] = (), **more: str) -> str:
    """Run a command to its end; return what it printed."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{home}", "HOME_OF_RUN": str(home), "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, words)], env=environment | more, cwd=home,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(restarts: int = 0) -> tuple[str, ...]:
    # Alone, it would keep the addresses of the processes before a restart.
    words = f"-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts {restarts}"
    return tuple(words.split())


def policy(folder: Path) -> list[torch.Tensor]:
    """All adapters of a finished run of three iterations."""
    runs = Checkpoints(folder, keep=9)
    assert runs.steps()[-1] == 3
    adapters = load_state(runs.path(3) / "state.safetensors")["policy"]["adapters"]
    return [tensor for tensors in adapters.values() for tensor in tensors]


def same(one: Path, other: Path) -> bool:
    pairs = zip(policy(one), policy(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def undisturbed(home) -> Path:
    """The run that `flowrl train --gpus 2` leaves."""
    words = ["train", "recipe.yaml", "--gpus", 2, "run.output_dir=undisturbed"]
    assert "Starting 2 processes" in flowrl(home, "-m", "flowrl", *words)
    assert json.loads((home / "undisturbed/ledger.jsonl").read_text().splitlines()[0])
    return home / "undisturbed"


def test_launchers_start_what_flowrl_starts_itself(home, undisturbed):
    accelerate = (
        *"-m accelerate.commands.launch --num_processes 2 --multi_gpu --num_machines 1".split(),
        *"--mixed_precision no --dynamo_backend no --main_process_port".split(), str(free_port()),
    )  # fmt: skip
    for name, launcher in (("torchrun", torchrun()), ("accelerate", accelerate)):
        words = ["train", "recipe.yaml", f"run.output_dir={name}"]
        flowrl(home, "-m", "flowrl", *words, launcher=launcher)
        assert same(home / name, undisturbed)


def test_a_run_survives_the_death_of_each_rank_without_a_shared_disk(home, undisturbed):
    words = ["program.py", "train", home / "recipe.yaml", "run.output_dir=run"]
    flowrl(home, *words, launcher=torchrun(restarts=3), KILLS="1:1 0:2", RUN="run")
    assert (home / "run-1:1").exists() and (home / "run-0:2").exists()  # both were killed
    assert same(home / "disk-0/run", undisturbed)
    assert [line["step"] for line in read_metrics(home / "disk-0/run")] == [0, 1, 2, 3]
    assert not (home / "disk-1/run").exists()


def test_a_network_in_parts_is_saved_resumed_evaluated_and_shown_from_one_disk(home, undisturbed):
    words = ["program.py", "train", home / "recipe.yaml", "runtime.shard=node"]
    words.append("run.output_dir=parts")
    flowrl(home, *words, launcher=torchrun(restarts=1), KILLS="1:1", RUN="parts")
    run = home / "disk-0/parts"
    assert (home / "parts-1:1").exists()  # it was killed, and resumed
    assert same(run, undisturbed)
    asked = ["evaluate", home / "recipe.yaml", "--json", "--lora"]
    whole = flowrl(home, "-m", "flowrl", *asked, run)
    parts = flowrl(
        home, "program.py", *asked, "parts", "runtime.shard=node", launcher=torchrun()
    )  # fmt: skip
    whole, parts = (json.loads(found.splitlines()[-1]) for found in (whole, parts))
    assert parts.keys() == whole.keys()
    for name in ("base", "aligned", "change"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-5)
    flowrl(
        home, "program.py", "gallery", "parts", "--count", 3, launcher=torchrun(),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert (run / "comparison/index.html").is_file() and (run / FILE).is_file()
    assert not any((home / "disk-1").rglob("*"))

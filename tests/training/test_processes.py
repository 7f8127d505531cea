"""1, 2 and 4 processes learn the same from every objective, with whole networks and in parts."""

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from test_two_processes import free_port

from flowrl.api import collect
from flowrl.utils.files import load_state

SCRIPT = Path(processes.__file__)
ROOT = SCRIPT.parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("processes")
    whole = processes.config_of("gdro", made, "whole")
    collect(whole, made / "store", groups=10)
    return made


def run(folder: Path, world: int, shard: str, dtype: str, cases: list[str]) -> None:
    """Start the script as so many processes."""
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(world), "--multi_gpu"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(free_port())]
    words = [*(launcher if world > 1 else []), str(SCRIPT), str(folder), shard, dtype, *cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def seen(folder: Path, case: str, world: int, shard: str, dtype: str) -> dict:
    return load_state(folder / f"{case}-{world}-{shard}-{dtype}")


def apart(one: dict, other: dict, name: str) -> float:
    return (one[name].double() - other[name].double()).abs().max().item()


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_processes_have_the_weights_of_whole_ones_bit_for_bit(folder, world):
    cases = [*processes.CASES] if world == 2 else ["grpo", "nft"]
    for shard in ("whole", "all"):
        run(folder, world, shard, "single", cases)
    for case in cases:
        whole, sharded = (seen(folder, case, world, shard, "single") for shard in ("whole", "all"))
        assert torch.equal(whole["weights"], sharded["weights"]), case
        assert torch.equal(whole["reward"], sharded["reward"]), case


def test_processes_learn_what_one_does_but_for_rounding(folder):
    """Where fp32 differs by more than 1e-5, which Adam makes of the last bits of small gradients,
    the same run in float64 agrees to 1e-9."""
    cases = [case for case in processes.CASES if case != "half"]
    for dtype in ("single", "double"):
        for world in (1, 2, 4):
            run(folder, world, "whole", dtype, cases)
    for case in cases:
        found = {}
        for dtype, limit in (("single", 1e-5), ("double", 1e-9)):
            one = seen(folder, case, 1, "whole", dtype)
            others = [seen(folder, case, world, "whole", dtype) for world in (2, 4)]
            found[dtype] = [apart(one, other, "weights") for other in others]
            assert max(apart(one, other, "reward") for other in others) <= 1e-5, case
            if dtype == "double":
                assert max(found[dtype]) <= limit, (case, found)
        print(case, found)

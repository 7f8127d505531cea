"""1, 2 and 4 processes learn the same from every objective, with whole networks and in parts."""

import math
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from chat_servers import free_port

from flowrl.api import collect
from flowrl.utils.files import load_state

SCRIPT = Path(processes.__file__)
ROOT = SCRIPT.parents[2]
EXACT = [case for case in processes.CASES if case != "bf16"]
# Work, which padding makes depend on the number of processes, and spreads inside a micro-batch.
LOCAL = ("forwards/", "tree/rows", "policy/ratio_std", "policy/implicit_reward_std")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what each number of processes saw, in fp32 and float64, whole and in parts."""
    made = tmp_path_factory.mktemp("processes")
    (made / processes.FEW).write_text("red\ngreen\nblue\n")
    collect(processes.config_of("gdro", made, "whole"), made / "store", groups=10)
    whole = [f"{case}:whole:single" for case in processes.CASES]
    whole += [f"{case}:whole:double" for case in EXACT]
    start(made, 1, whole)
    start(made, 2, [*whole, *(f"{case}:all:single" for case in processes.CASES)])
    parts = [f"{case}:node:single" for case in processes.CASES]
    start(made, 4, [*whole, *parts, *(f"{case}:all:single" for case in ("tree", "bf16", "draft"))])
    return made


def start(folder: Path, world: int, cases: list[str]) -> None:
    """Start the script once, as so many processes that do all these cases."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world)]
    launcher += ["--master_port", str(free_port())]
    words = [*(launcher if world > 1 else []), str(SCRIPT), str(folder), *cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with open(folder / f"{world}.log", "w") as log:
        done = subprocess.run(
            [sys.executable, *words], env=environment, cwd=ROOT, stdout=log, stderr=log,
            timeout=7200,
        )  # fmt: skip
    assert done.returncode == 0, (folder / f"{world}.log").read_text()[-5000:]


def seen(folder: Path, case: str, world: int, shard: str, dtype: str) -> dict:
    return load_state(folder / f"{case}-{world}-{shard}-{dtype}")


def apart(folder: Path, case: str, world: int, dtype: str) -> tuple[float, float]:
    """How far rewards and adapters of so many processes are from one's."""
    one, several = (seen(folder, case, n, "whole", dtype) for n in (1, world))
    rewards = (one["rewards"].double() - several["rewards"].double()).abs().nan_to_num()
    pairs = [(t.double(), several["adapters"][n].double()) for n, t in one["adapters"].items()]
    return rewards.max().item(), max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("case", processes.CASES)
def test_networks_in_parts_learn_the_same_bit_for_bit(folder, case):
    pairs = [(2, "all"), (4, "node")] + [(4, "all")] * (case in ("tree", "bf16", "draft"))
    for world, shard in pairs:
        whole, parts = (seen(folder, case, world, s, "single") for s in ("whole", shard))
        assert torch.equal(whole["rewards"].nan_to_num(), parts["rewards"].nan_to_num())
        for name, adapter in whole["adapters"].items():
            assert torch.equal(adapter, parts["adapters"][name]), (world, shard, name)


@pytest.mark.parametrize("case", EXACT)
def test_processes_learn_what_one_does_but_for_rounding(folder, case):
    """Where fp32 differs by more than 1e-5, which Adam makes of the last bits of small gradients,
    the same run in float64 agrees to 1e-9."""
    for world in (2, 4):
        single, exact = (apart(folder, case, world, dtype) for dtype in ("single", "double"))
        assert max(single) <= 1e-5 or max(exact) <= 1e-9


@pytest.mark.parametrize("case", EXACT)
def test_what_is_logged_is_of_all_processes(folder, case):
    one, *several = (seen(folder, case, n, "whole", "double")["metrics"] for n in (1, 2, 4))
    for other in several:
        for mine, theirs in zip(one, other, strict=True):
            for name, value in mine.items():
                if name.startswith(LOCAL):
                    continue
                missing = math.isnan(value) and math.isnan(theirs[name])
                near = math.isclose(theirs[name], value, rel_tol=1e-7, abs_tol=1e-9)
                assert near or missing, (name, value, theirs)


def test_an_evaluation_is_of_all_processes(folder):
    """What it scores, and what the radar sees of each image."""
    one, *several = (seen(folder, "grpo", n, "whole", "double")["evaluation"] for n in (1, 2, 4))
    assert len(one["statistics"]) == len(one["thumbnails"]) == 5
    for other in several:
        for name, values in one.items():
            torch.testing.assert_close(other[name], values, rtol=0, atol=1e-5)


def test_the_policy_learns_something_in_every_case(folder):
    for case in processes.CASES:
        single, adapters = seen(folder, case, 1, "whole", "single"), []
        # The first iteration: after a step of that size KTO's sigmoid is flat, its gradient 1e-43.
        assert single["metrics"][0]["grad/norm"] > 0, case
        if case in ("all_adapters", "bf16"):
            adapters = ["default", "ema", "old"]
            values = [single["adapters"][name] for name in adapters]
            assert not torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])

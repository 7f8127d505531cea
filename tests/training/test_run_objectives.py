"""Runs with an old policy, or on a store, resume as if nothing had happened."""

from pathlib import Path

import pytest

from flowrl.api import align, collect
from flowrl.training.tracking import read_metrics

ODE = {
    "prompts_per_iteration": 2,
    "group_size": 4,
    "num_inference_steps": 4,
    "batch_size": 8,
    "tree": {"kind": "ode"},
}
NFT = {"kind": "nft", "noising": {"count": 2}, "old_decay": {"rate": 0.2, "limit": 0.6}}
GDRO = {"kind": "gdro", "noising": {"count": 2}}
ITERATIONS = 4


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(name: str, case: str, iterations: int = ITERATIONS):
        run = {"iterations": iterations, "checkpoint_every": 1, "output_dir": str(tmp_path / name)}
        rollout, objective = dict(ODE), NFT
        if case != "nft":
            rollout, objective = ODE | {"store": str(tmp_path / "store")}, GDRO
        return tiny_config(run=run | {"trackers": [], "sample_every": 0}, rollout=rollout,
                           objective=objective)  # fmt: skip

    return make


@pytest.mark.parametrize("case", ["nft", "gdro"])
def test_a_run_in_two_sessions_ends_as_one_does(tiny_config, config_for, tmp_path, case):
    if case != "nft":
        recipe = tiny_config(rollout=ODE, objective={"kind": "sft"})
        collect(recipe, tmp_path / "store", groups=4)
    align(config_for("whole", case))
    align(config_for("parts", case, iterations=2))
    align(config_for("parts", case), resume="latest")
    whole, parts = (numbers(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) == ITERATIONS and parts == whole
    assert len({line["loss"] for line in whole}) == ITERATIONS  # and something is learned


def numbers(folder: Path) -> list[dict]:
    """What every iteration logged, but for the time it took."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in read_metrics(folder)
        if "loss" in line
    ]

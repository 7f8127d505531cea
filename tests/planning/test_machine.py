"""What a machine lacks is named before anything is downloaded or loaded."""

import pytest
import torch

from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.planning import machine
from flowrl.planning.machine import check_machine

REAL, BRIGHT = "flux.2-klein-4b-nft-24gb", ["rewards=[{name: brightness}]"]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_missing_package_is_named_even_if_one_insists(monkeypatch):
    check_machine(load_config(REAL, BRIGHT), insist=True)
    check_machine(load_config("quickstart"))
    find = machine.importlib.util.find_spec
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find(n, *a)
    )
    with pytest.raises(UserError, match="pip install wandb"):
        check_machine(load_config(REAL, [*BRIGHT, "run.trackers=[wandb]"]), insist=True)


def test_train_without_a_gpu_names_the_way_to_insist_before_it_loads(flowrl, tmp_path):
    words = ["train", REAL, *BRIGHT, f"run.output_dir={tmp_path / 'run'}"]
    code, out, err = flowrl(*words)
    assert code == 1 and "loading" not in out + err and "--yes" in err
    assert not (tmp_path / "run").exists()


def test_a_missing_c_compiler_is_named_where_blocks_are_compiled(monkeypatch):
    config = load_config("quickstart", ["pipeline.compile=true"])
    check_machine(config)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"pipeline\.compile"):
        check_machine(config)

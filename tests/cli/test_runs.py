"""`flowrl runs`: what lies on disk."""

import json

import torch

from flowrl.training.checkpoint import STATE
from flowrl.training.ledger import Ledger
from flowrl.utils.files import save_state


def write_run(folder, *, finished: bool, steps=(1, 2, 3)):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {iterations: 3}")
    ledger = Ledger(folder)
    recipe = {"run": {"iterations": 3}}
    ledger.append("start", flowrl="0", step=None, recipe=recipe, facts={}, changed={})
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:06d}"
        save_state(path / STATE, {"weights": torch.zeros(250_000)})
    (folder / "set-aside" / "old").mkdir(parents=True)
    (folder / "set-aside" / "old" / "state.safetensors").write_bytes(bytes(500_000))
    if finished:
        ledger.append("stop", step=3, reason="done", complete=True)


def test_runs_are_listed_with_their_state_and_size(tmp_path, flowrl):
    for name, finished in (("done", True), ("half", False)):
        write_run(tmp_path / name, finished=finished)
    code, out, _ = flowrl("runs", str(tmp_path), "--json")
    rows = {row["run"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and rows["done"]["state"] == "finished" and rows["half"]["state"] == "killed"
    assert rows["done"]["MB"] == 3.5 and rows["done"]["step"] == rows["done"]["iterations"] == 3
    assert flowrl("runs", str(tmp_path / "none"))[0] == 1

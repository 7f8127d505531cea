"""`flowrl runs`: what lies on disk."""

import json

import torch

from flowrl.training.checkpoint import STATE
from flowrl.training.ledger import Ledger
from flowrl.utils.files import save_state


def test_runs_are_listed_with_their_state_and_size(tmp_path, flowrl):
    recipe = {"run": {"iterations": 3}}
    for name in ("done", "half"):
        folder = tmp_path / name
        (folder / "set-aside" / "old").mkdir(parents=True)
        (folder / "set-aside" / "old" / STATE).write_bytes(bytes(500_000))
        (folder / "config.yaml").write_text("run: {iterations: 3}")
        for step in (1, 2, 3):
            path = folder / "checkpoints" / f"step-{step:06d}" / STATE
            save_state(path, {"weights": torch.zeros(250_000)})
        ledger = Ledger(folder)
        ledger.append("start", flowrl="0", step=None, recipe=recipe, facts={}, changed={})
        if name == "done":
            ledger.append("stop", step=3, reason="done", complete=True)
    code, out, _ = flowrl("runs", str(tmp_path), "--json")
    rows = {row["run"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and rows["done"]["state"] == "finished" and rows["half"]["state"] == "killed"
    assert rows["done"]["MB"] == 3.5 and rows["done"]["step"] == rows["done"]["iterations"] == 3
    assert flowrl("runs", str(tmp_path / "none"))[0] == 1

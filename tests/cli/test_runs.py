"""`flowrl runs`: what lies on disk."""

import json

import pytest
import torch

from flowrl.cli import main
from flowrl.training.checkpoint import STATE
from flowrl.training.ledger import Ledger
from flowrl.utils.files import save_state
from flowrl.utils.journal import seal_line


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def write_run(folder, *, finished: bool, steps=(1, 2, 3)):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {iterations: 3}")
    ledger = Ledger(folder)
    ledger.begin(version="0", recipe={"run": {"iterations": 3}}, facts={}, step=None, changed={})
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:06d}"
        save_state(path / STATE, {"weights": torch.zeros(250_000)})
    (folder / "set-aside" / "old").mkdir(parents=True)
    (folder / "set-aside" / "old" / "state.safetensors").write_bytes(bytes(500_000))
    if finished:
        ledger.append("stop", step=3, reason="done", complete=True)


def test_runs_are_listed_with_their_state_and_size(tmp_path, capsys):
    for name, finished in (("done", True), ("half", False)):
        write_run(tmp_path / name, finished=finished)
    code, out, _ = run(capsys, "runs", str(tmp_path), "--json")
    rows = {row["run"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and rows["done"]["state"] == "finished" and rows["half"]["state"] == "killed"
    assert rows["done"]["MB"] == 3.5 and rows["done"]["iteration"] == rows["done"]["of"] == 3
    assert run(capsys, "runs", str(tmp_path / "none"))[0] == 1


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_screen_of_80_columns_breaks_no_word(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "DiffusionNFT" / "Tiny-SANA-seed-3"
    write_run(folder, finished=False)
    names = ("geneval_strict", "tiny_quality_judge", "unseen_combinations")
    rows = [
        {"step": step} | {f"eval/{name}": 0.25 * (1 + step) for name in names} for step in (0, 3)
    ]
    lines = [seal_line(row).decode() + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    Ledger(folder).append("stop", step=3, seconds=9.0, reason="time", complete=True, detail="")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, which wraps
    monkeypatch.setenv("TERM", "dumb")
    _, out, _ = run(capsys, "runs", str(tmp_path))
    table = out.partition("run.max_minutes")[0]
    assert "DiffusionNFT/Tiny-SANA-seed-3" in table and "3 of 3" in table
    words = table.split()
    assert set(names) <= set(words) and words.count("1.000") == 3 and "stopped" in words
    assert max(map(len, table.splitlines())) <= 80
    assert "continue: flowrl train --resume" in out and str(folder) in out

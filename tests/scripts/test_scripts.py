"""The scripts: a family's training with its default recipe, gallery entries of finished runs."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flowrl.cli import train as training
from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAMILIES = ("sd3", "flux", "sana")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- training of a family -----------------------------------------------------------------------


def test_a_script_trains_the_recipes_of_its_family(capsys):
    # Without a recipe the familys own is trained with the changes.
    for family in FAMILIES:
        module = script(f"train_{family}")
        module.main(["--learning_rate", "2e-4", "--print-config"])
        printed = load_yaml(capsys.readouterr().out)
        assert printed == load_config(module.RECIPE, ["optim.lr=2e-4"]).model_dump(mode="json")
        assert printed["pipeline"]["backbone"] == family
    # The commands it shows name recipes of its family.
    for family in FAMILIES:
        text = (script(f"train_{family}").__doc__ or "").replace("\\\n", " ")
        commands = re.findall(rf"(?<=scripts/train_{family}\.py)( .*)", text)
        assert len(commands) == 3 and "--num_machines 2 --num_processes 16" in text
        for command in commands[1:]:
            assert (
                load_config(sort_arguments(shlex.split(command)).recipe).pipeline.backbone == family
            )
    # A recipe of another family is refused.
    with pytest.raises(UserError, match="is a recipe for sd3, .* trains flux: .*train_sd3.py"):
        script("train_flux").main(["quickstart"])
    with pytest.raises(UserError, match="is a recipe for mine:Own, .* take flowrl train"):
        script("train_sana").main(["quickstart", "pipeline.backbone=mine:Own"])


def test_a_run_to_go_on_with_brings_its_own_recipe(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(training, "train", lambda *words, **flags: calls.append((words, flags)))
    (tmp_path / "config.yaml").write_text("extends: quickstart")
    words = ["--resume_from_checkpoint", str(tmp_path)]
    script("train_sd3").main([*words, "--dry-run"])
    assert calls == [((words,), {"dry_run": True, "print_config": False, "accept_changes": False})]
    with pytest.raises(UserError, match="is a recipe for sd3, but this script trains sana"):
        script("train_sana").main(words)
    script("train_flux").main(["--resume_from_checkpoint", "latest"])
    assert calls[-1][0][0][0] == script("train_flux").RECIPE


@pytest.mark.slow
def test_the_check_of_two_gpus_shows_on_a_cpu_that_it_works(tmp_path):
    words = ["--device", "cpu", "--gpus", "2", "--iterations", "1", "--output", "two.json"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "two_gpus.py", *words], cwd=tmp_path, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "two.json").read_text())
    assert found["bits_equal"] == {"null": True, "node": True, "all": True}
    assert found["weights_gb"]["node"] < 0.7 * found["weights_gb"]["null"]
    assert 0 < found["from_one_process"] < 1e-3 and found["device"] == "cpu"


# --- gallery entries ----------------------------------------------------------------------------


def test_the_spread_of_a_bench_is_that_of_each_of_its_ratios(monkeypatch, capsys):
    bench_spread = script("bench_spread")
    row = {"size": "x", "forward_share": 0.9, "seconds": 5.0, "of_planned": None, "phi": None,
           "phases": [{"phase": "rollout", "in_forwards": 0.9, "seconds": 2.0},
                      {"phase": "decode", "in_forwards": 0.0}]}  # fmt: skip
    found = dict(bench_spread.ratios(row))
    assert found == {"x: forward_share": 0.9, "x rollout: in_forwards": 0.9}
    texts = iter(json.dumps({"job": "update", "ratio": ratio}) for ratio in (1.0, 0.9, 1.2))
    monkeypatch.setattr(bench_spread, "printed_by_a_process", lambda words: next(texts))
    monkeypatch.setattr(sys, "argv", ["", "--runs", "3", "rollout", "--batch", "8"])
    bench_spread.main()
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split() == ["3", "0.9000", "1.0000", "1.2000", "30.0%", "update:", "ratio"]

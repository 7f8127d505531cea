"""Scripts beside the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


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

"""Scripts beside the package, and the Dockerfile."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flowrl.cli import main
from flowrl.errors import UserError
from scripts.gradient_signal import measure, step_signals

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


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_shares_and_what_repeats_are_those_of_the_gradients_that_were_made():
    size, noise = 4000, torch.tensor([1.0, 2.0])[:, None]
    fixed = nn.functional.normalize(randn(2, size, seed=99), dim=1) * torch.tensor([[1.0], [0.0]])
    made = [fixed + randn(2, size, seed=m) / math.sqrt(size) * noise for m in range(6)]
    first, second, whole = step_signals(torch.stack(made))
    assert first.rms == pytest.approx(math.sqrt(2), rel=0.03)
    assert (first.share, second.share) == pytest.approx((2 / 6, 4 / 6), abs=0.02)
    assert first.repeats == pytest.approx(1 / 2, abs=0.03)
    assert second.repeats == pytest.approx(0, abs=0.03)
    assert whole.repeats == pytest.approx(1 / 6, abs=0.03)
    with pytest.raises(ValueError, match="two rollouts"):
        step_signals(torch.stack(made[:1]))


def test_the_steps_of_a_recipe_share_its_gradient_and_images_have_none(tiny_config, load_tiny):
    config = tiny_config(rollout={"num_inference_steps": 3})
    rows = measure(config, 2, load_tiny())
    assert [row["step"] for row in rows] == [0, 1, "all"]
    assert sum(row["share of power"] for row in rows[:-1]) == pytest.approx(1)
    assert all(row["rms norm"] > 0 for row in rows)
    nft = tiny_config(objective={"kind": "nft"}, rollout={"tree": {"kind": "ode"}})
    with pytest.raises(UserError, match=r"objective\.kind"):
        measure(nft, 2, load_tiny())


ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n(?!#)\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def arguments(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.split()[0] == name]


def test_it_is_not_root_in_the_end_and_starts_the_program(capsys):
    users = [i for i, line in enumerate(LINES) if line.startswith("USER ")]
    assert users and LINES[users[-1]] != "USER root"
    assert not any(line.startswith("RUN") for line in LINES[users[-1] :])
    words = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert words == ["flowrl", "doctor"]
    with pytest.raises(SystemExit) as end:
        main(words[1:])
    assert end.value.code in (0, None) and "torch" in capsys.readouterr().out

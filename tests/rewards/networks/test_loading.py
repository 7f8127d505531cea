import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flowrl_rewards.networks.loading import (
    read_weights,
)
from torch import nn

ROOT = Path(__file__).parents[3]
LIGHT = """
import sys
import flowrl_rewards.detectors.tiny
print("flowrl" in sys.modules)  # the tiny detector does not know the generator
import flowrl
from flowrl_rewards import aesthetic, clipscore, hpsv2, hpsv3, imagereward, pickscore
for made in (pickscore.PickScore, clipscore.CLIPScore, hpsv2.HPSv2,
             aesthetic.Aesthetic, imagereward.ImageReward, hpsv3.HPSv3):
    made()
from flowrl_rewards.detectors import *
for name in DETECTORS: load_detector(name)
for name in COLOR_NAMERS: load_color_namer(name)
print(sorted({"torchvision", "open_clip", "transformers", "huggingface_hub"} & set(sys.modules)))
"""


def test_importing_and_making_rewards_and_detectors_loads_no_heavy_package():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", LIGHT], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", "[]"]


def test_weights_are_read_from_both_kinds_of_files_and_nothing_else(tmp_path):
    from safetensors.torch import save_file

    state = {"a": torch.arange(3.0)}
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "nested.pt")
    save_file(state, tmp_path / "safe.safetensors")
    for name in ("plain.pt", "nested.pt", "safe.safetensors"):
        found = read_weights(tmp_path / name)
        assert list(found) == ["a"] and torch.equal(found["a"], state["a"])
    torch.save({"a": nn.Linear(1, 1)}, tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for name in ("code.pt", "text.pt"):
        with pytest.raises(ValueError, match=f"{name} is not read as plain weights"):
            read_weights(tmp_path / name)

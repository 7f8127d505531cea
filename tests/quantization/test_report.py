"""What a run says it computes in: the real dtype, the name that options use, since when."""

import json

import pytest
import torch
from torch import nn

from flowrl.quantization.backends import Capability, resolve
from flowrl.quantization.layer_rules import LayerRules, choose_layers
from flowrl.quantization.rollout_model import read_precision, write_precision

CPU = Capability(device="cpu", name="cpu", compute=None, scaled_mm=True)
EMULATED, PLAIN = resolve("nvfp4-emulated", CPU), resolve("bf16", CPU)


@pytest.fixture
def choices():
    network = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    return choose_layers(network, LayerRules(keep=("b",), min_dim=0), "nvfp4")


def test_the_file_says_what_it_is_about_and_since_when(choices, tmp_path):
    write_precision(tmp_path, EMULATED, choices, dtype=torch.float16, lora="side")
    found = json.loads((tmp_path / "precision.json").read_text())
    assert (found["what"], found["dtype"]) == ("candidates", "float16")
    assert (found["precision"], found["format"]) == ("nvfp4-emulated", "nvfp4")
    assert found["lora"] == "side"
    assert len(found["layers"]) == 2 and found["quantised_share"] == 0.5
    assert read_precision(tmp_path) == "nvfp4-emulated"
    assert read_precision(tmp_path, "other.json") is None

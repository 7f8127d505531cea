"""Processes whose texts have other lengths call a network in parts equally often."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_texts
import torch

from flowrl.utils.files import load_state

SCRIPT = Path(sharded_texts.__file__)


@pytest.mark.parametrize(
    "name",  # the first also takes one noise level a call
    ["ZImagePipeline", pytest.param("CogView4Pipeline", marks=pytest.mark.slow)],
)
def test_texts_of_several_lengths_give_what_the_whole_network_gives(tmp_path, name):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(tmp_path), name],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in ("0", "1"):
        seen = load_state(tmp_path / rank)
        assert seen["whole"].keys() == seen["parts"].keys()
        for what, tensor in seen["whole"].items():
            assert torch.equal(seen["parts"][what], tensor), (rank, what)

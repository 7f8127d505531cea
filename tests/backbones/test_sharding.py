"""Processes whose texts have other lengths call a network in parts equally often."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_texts
import torch

from flowrl.utils.files import load_state

SCRIPT = Path(sharded_texts.__file__)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZImagePipeline", "CogView4Pipeline"])  # one level a call; many
def test_texts_of_several_lengths_give_what_the_whole_network_gives(tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    place |= {"PYTHONPATH": str(SCRIPT.parents[2]), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), name], stderr=subprocess.PIPE, text=True,
            env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    for process in started:
        told = process.communicate(timeout=300)[1]
        assert process.returncode == 0, told[-5000:]
    for rank in "01":
        seen = load_state(tmp_path / rank)
        assert seen["whole"].keys() == seen["parts"].keys()
        for what, tensor in seen["whole"].items():
            assert torch.equal(seen["parts"][what], tensor), (rank, what)

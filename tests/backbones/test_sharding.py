"""Processes whose texts have other lengths call a network in parts equally often."""

import pytest
import sharded_texts
import torch

from flowrl.utils.files import load_state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZImagePipeline", "CogView4Pipeline"])  # one level a call; many
def test_texts_of_several_lengths_give_what_the_whole_network_gives(launch, tmp_path, name):
    for process in launch(sharded_texts.__file__, tmp_path, name):
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output[-5000:]
    for rank in "01":
        seen = load_state(tmp_path / rank)
        assert seen["whole"].keys() == seen["parts"].keys()
        for what, tensor in seen["whole"].items():
            assert torch.equal(seen["parts"][what], tensor), (rank, what)

import pytest
import torch
from flowrl_rewards.networks.loading import (
    read_weights,
)
from torch import nn


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

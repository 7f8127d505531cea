"""The LoRA that training writes, read by a pipeline that has never heard of flowrl."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowrl.backbones.lora_files import FILE, count_layers, load_lora, read_lora, save_lora
from flowrl.backbones.lora_formats import lora_file
from flowrl.backbones.policy import POLICY
from flowrl.errors import UserError


def test_the_file_carries_alpha_and_only_the_transformers_layers(make_learner, load_tiny, tmp_path):
    policy = make_learner(lora={"rank": 4, "alpha": 6}).policy
    network = policy.network
    save_lora(policy.backbone.pipeline, tmp_path, adapter=POLICY)
    with safe_open(tmp_path / FILE, "pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
        names = list(file.keys())
    assert header["transformer.lora_alpha"] == 6 and header["transformer.r"] == 4
    assert all(name.startswith("transformer.") for name in names)
    assert len(names) == 2 * count_layers(network) > 0
    assert load_lora(load_tiny(), tmp_path / FILE) == count_layers(network)
    state, strength = read_lora(tmp_path)
    assert strength == 1.5
    save_file({f"transformer.{k}": t for k, t in state.items()}, tmp_path / FILE)
    assert read_lora(tmp_path)[1] == 1.0  # without its metadata


def factors(name: str, width: int = 128) -> dict[str, torch.Tensor]:
    return {
        f"{name}.lora_A.weight": torch.zeros(4, width),
        f"{name}.lora_B.weight": torch.zeros(width, 4),
    }


BLOCK = "transformer.transformer_blocks"
USELESS = {
    "of another part": factors("unet.to_q"),
    "of a text encoder, too": factors(f"{BLOCK}.0.attn.to_q") | factors("text_encoder.to_q"),
    "of unknown layers": factors("transformer.no_blocks.0.attn.to_q"),
    "partly of unknown layers": factors(f"{BLOCK}.0.attn.to_q") | factors(f"{BLOCK}.99.attn.to_q"),
    "of other widths": factors(f"{BLOCK}.0.attn.to_q", width=64),
    "no lora at all": {"transformer.weight": torch.zeros(2)},
}


def test_a_file_that_is_missing_broken_or_would_load_into_nothing_is_an_error(load_tiny, tmp_path):
    with pytest.raises(UserError, match="no LoRA at"):
        lora_file(tmp_path)
    for tensors in USELESS.values():
        save_file(tensors, tmp_path / FILE)
        with pytest.raises(UserError, match=FILE):
            load_lora(load_tiny(), tmp_path)
    (tmp_path / FILE).write_bytes(b"not a safetensors file")
    with pytest.raises(UserError, match="not a safetensors file"):
        read_lora(tmp_path)

"""The LoRA that training writes, read by a pipeline that has never heard of flowrl."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowrl.backbones.lora_files import (
    FILE,
    count_layers,
    load_lora,
    lora_file,
    read_lora,
    save_lora,
)
from flowrl.backbones.policy import EMA, POLICY
from flowrl.errors import UserError

PROMPTS = ["a red circle", "two stars"]


def images(pipeline) -> torch.Tensor:
    noise = [torch.Generator().manual_seed(i) for i in range(2)]
    options = {"guidance_scale": 1.0, "num_inference_steps": 3, "max_sequence_length": 12}
    return pipeline(PROMPTS, generator=noise, output_type="pt", **options).images


@pytest.fixture(scope="module")
def trained(make_learner, tmp_path_factory):
    """A policy with an average after two real updates (alpha != rank), and their LoRA files."""
    learner = make_learner(
        lora={"rank": 4, "alpha": 6}, ema={"decay": 0.5}, optim={"lr": 0.03, "micro_batch": 8}
    )
    for iteration in range(2):
        learner.iterate(iteration)
    folders = {}
    for name in (POLICY, EMA):
        folders[name] = tmp_path_factory.mktemp(name)
        save_lora(learner.policy.backbone.pipeline, folders[name], adapter=name)
    return learner, folders


def test_a_fresh_pipeline_with_the_lora_generates_the_policys_images(trained, load_tiny):
    learner, folders = trained
    base, found = images(load_tiny()), []
    for name in (POLICY, EMA):
        fresh = load_tiny()
        fresh.load_lora_weights(folders[name])
        assert count_layers(fresh.transformer) == count_layers(learner.policy.network)
        found.append(images(fresh))
        with learner.policy.using(name):
            own = images(learner.policy.backbone.pipeline)
        torch.testing.assert_close(found[-1], own, rtol=0, atol=1e-6)
        assert (found[-1] - base).abs().max() > 1e-3
    assert (found[0] - found[1]).abs().max() > 1e-4


def test_the_file_carries_alpha_and_only_the_transformers_layers(trained, load_tiny):
    learner, folders = trained
    with safe_open(folders[POLICY] / FILE, "pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
        names = list(file.keys())
    assert header["transformer.lora_alpha"] == 6 and header["transformer.r"] == 4
    assert all(name.startswith("transformer.") for name in names)
    assert len(names) == 2 * count_layers(learner.policy.network) > 0
    assert load_lora(load_tiny(), folders[POLICY] / FILE) == count_layers(learner.policy.network)


def test_alpha_matters_without_it_the_images_are_others(trained, load_tiny, tmp_path):
    state, strength = read_lora(trained[1][POLICY])
    assert strength == 1.5
    save_file({f"transformer.{k}": t for k, t in state.items()}, tmp_path / FILE)
    assert read_lora(tmp_path)[1] == 1.0
    whole, bare = load_tiny(), load_tiny()
    whole.load_lora_weights(trained[1][POLICY])
    bare.load_lora_weights(tmp_path)
    assert not torch.allclose(images(whole), images(bare), atol=1e-4)


def factors(name: str, width: int = 128) -> dict[str, torch.Tensor]:
    return {
        f"{name}.lora_A.weight": torch.zeros(4, width),
        f"{name}.lora_B.weight": torch.zeros(width, 4),
    }


BLOCK = "transformer.transformer_blocks"
USELESS = {
    "of another part": factors("unet.to_q"),
    "without a prefix": factors("transformer_blocks.0.attn.to_q"),
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

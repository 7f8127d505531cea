"""The adapters of each family: which layers they are on, and the file for its own pipeline."""

import tempfile

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

from flowrl.assembly.learner import build_backbone, build_policy
from flowrl.backbones.loading import pipeline_call_arguments
from flowrl.backbones.lora_files import (
    FILE,
    METADATA,
    count_layers,
    load_lora,
    read_lora,
    save_lora,
)
from flowrl.backbones.lora_formats import open_lora
from flowrl.backbones.policy import EMA, POLICY
from flowrl.backbones.sd3 import DUAL_TARGETS
from flowrl.config import parse_config
from flowrl.errors import UserError

# SD3's last block has no way back to the text.
LAYERS = {"sd3": 5 * 8 - 1, "flux": 2 * 12 + 6 * 3, "sana": 5 * 8}
PROMPTS = ["a red circle", "two stars"]


def recipe(family="sd3", **lora):
    return parse_config(
        {
            "pipeline": {"backbone": family, "max_sequence_length": 12},
            "lora": {"rank": 4, "alpha": 6} | lora,  # as diffusers computes
            "ema": {"decay": 0.5},
            "prompts": {"train": "tiny:all:train"},
            "rewards": [{"name": "brightness"}],
        }
    )


def policy_of(pipeline, config):
    policy = build_policy(
        config, build_backbone(config.pipeline, pipeline, guidance=1.0), keep_old=False
    )
    generator = torch.Generator().manual_seed(0)
    for name in (POLICY, EMA):
        for parameter in policy._by_name[name]:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def images(pipeline, guidance=2.0):
    return pipeline(
        PROMPTS,
        guidance_scale=guidance,
        num_inference_steps=3,
        max_sequence_length=12,
        generator=[torch.Generator().manual_seed(i) for i in range(2)],
        output_type="pt",
        **pipeline_call_arguments(pipeline),
    ).images


@pytest.fixture(scope="module", params=LAYERS)
def saved(request, load_tiny, tmp_path_factory):
    family = request.param
    policy = policy_of(load_tiny(family=family), recipe(family))
    folder = tmp_path_factory.mktemp(family)
    for name in (POLICY, EMA):
        save_lora(policy.backbone.pipeline, folder / name, adapter=name)
    return family, policy, folder


def test_every_layer_of_the_familys_list_is_adapted_saved_and_loaded_with_its_strength(
    saved, load_tiny
):
    family, policy, folder = saved
    assert count_layers(policy.network) == LAYERS[family]
    assert load_lora(load_tiny(family=family), folder / POLICY) == LAYERS[family]
    assert read_lora(folder / POLICY)[1] == 1.5
    other = {"sd3": "flux", "flux": "sana", "sana": "sd3"}[family]
    with pytest.raises(UserError, match="pipeline"):
        load_lora(load_tiny(family=other), folder / POLICY)


def test_the_file_is_diffusers_own_and_needs_no_temporary_folder(saved, tmp_path, monkeypatch):
    _, policy, _ = saved
    pipeline = policy.backbone.pipeline
    type(pipeline).save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=get_peft_model_state_dict(policy.network, adapter_name=POLICY),
        transformer_lora_adapter_metadata={
            key: sorted(value) if isinstance(value, set) else value
            for key, value in policy.network.peft_config[POLICY].to_dict().items()
        },
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    save_lora(pipeline, tmp_path / "ours", adapter=POLICY)
    with (
        safe_open(tmp_path / "ours" / FILE, "pt") as ours,
        safe_open(tmp_path / "theirs" / FILE, "pt") as theirs,
    ):
        own = {k: v for k, v in ours.metadata().items() if not k.startswith("flowrl_")}
        assert own == theirs.metadata()
        assert set(ours.keys()) == set(theirs.keys())
        for name in theirs.keys():
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))


def test_its_own_pipeline_takes_the_lora_whole_and_samples_the_policys_images(saved, load_tiny):
    family, policy, folder = saved
    for name in (POLICY, EMA):
        fresh = load_tiny(family=family)
        base = images(fresh)
        fresh.load_lora_weights(folder / name)
        assert count_layers(fresh.transformer) == LAYERS[family]
        loaded = images(fresh)
        with policy.using(name):
            own = images(policy.backbone.pipeline)
        # Weights from a file lie otherwise in memory, so that sums round otherwise in their last
        # bit; after all steps that is up to a hundredth of a grey level.
        torch.testing.assert_close(loaded, own, rtol=0, atol=4e-5)
        assert (loaded - base).abs().max() > 1e-2


@pytest.fixture(scope="module")
def dual(load_tiny):
    from diffusers import SD3Transformer2DModel

    def load():
        pipeline = load_tiny()
        config = dict(pipeline.transformer.config) | {
            "num_layers": 4,
            "dual_attention_layers": (0, 1),
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipeline.transformer = SD3Transformer2DModel.from_config(config).eval()
        return pipeline

    return load


def adapted(policy):
    return {name for name, module in policy.network.named_modules() if hasattr(module, "lora_A")}


def test_dual_attention_is_frozen_unless_asked_for_and_comes_beside_given_targets(dual):
    plain = policy_of(dual(), recipe())
    both = policy_of(dual(), recipe(dual_attention=True))
    assert not any("attn2" in name for name in adapted(plain))
    added = {f"transformer_blocks.{i}.{target}" for i in (0, 1) for target in DUAL_TARGETS}
    assert adapted(both) - adapted(plain) == added
    policy = policy_of(dual(), recipe(dual_attention=True, targets=["attn.to_q"]))
    assert {name.split(".", 2)[2] for name in adapted(policy)} == {"attn.to_q", *DUAL_TARGETS}


def test_a_lora_with_dual_attention_is_the_policy_in_a_fresh_pipeline(dual, tmp_path):
    policy = policy_of(dual(), recipe(dual_attention=True))
    save_lora(policy.backbone.pipeline, tmp_path, adapter=POLICY)
    fresh = dual()
    assert load_lora(fresh, tmp_path) == count_layers(policy.network) == 4 * 8 - 1 + 2 * 4
    torch.testing.assert_close(images(fresh), images(policy.backbone.pipeline), rtol=0, atol=1e-5)


def test_dual_attention_is_refused_where_is_none(load_tiny):
    """SANA's attention to the text is called attn2 too, and is not meant."""
    for family in LAYERS:
        with pytest.raises(UserError, match="lora.dual_attention"):
            policy_of(load_tiny(family=family), recipe(family, dual_attention=True))


def test_headers_that_say_no_strength_are_refused_by_name(tmp_path):
    factors = {
        "transformer.a.lora_A.weight": torch.ones(2, 3),
        "transformer.a.lora_B.weight": torch.ones(3, 2),
    }
    path = tmp_path / FILE

    def write(header, tensors=factors):
        save_file(tensors, path, metadata={METADATA: header})

    for header, words in (
        ("{no json", "header lora_adapter_metadata that is not JSON"),
        ("[" * 2000 + "]" * 2000, "header lora_adapter_metadata that is not JSON"),
        ("[1]", "that is no JSON object"),
        ('{"transformer.r": 0}', "r = 0 in its header.*a whole number from 1"),
        ('{"transformer.r": "2"}', "r = '2' in its header"),
        ('{"transformer.r": true}', "r = True in its header"),
        ('{"transformer.r": 2.0}', "r = 2.0 in its header"),
        ('{"transformer.lora_alpha": "much"}', "lora_alpha = 'much'.*a finite number"),
        ('{"transformer.lora_alpha": null}', "lora_alpha = None"),
        ('{"transformer.lora_alpha": NaN}', "lora_alpha = nan"),
        ('{"transformer.lora_alpha": 0}', "lora_alpha = 0 in"),
    ):
        write(header)
        with pytest.raises(UserError, match=f"{FILE} has .*{words}.*: export the run"):
            read_lora(path)
        with pytest.raises(UserError, match=words):
            open_lora(path, alpha=1)
    write("{}", {name: torch.ones(0, 3) for name in factors})
    with pytest.raises(UserError, match="a tensor of rank 0, a.lora_A.weight"):
        read_lora(path)
    write('{"transformer.r": 2, "transformer.lora_alpha": 6}')
    assert read_lora(path)[1] == 3

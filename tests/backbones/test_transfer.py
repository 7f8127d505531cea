"""A small pipeline's LoRA on a larger pipeline: nothing at 0, RLG on itself, refused elsewhere."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.transfer import Transfer
from flowrl.errors import UserError

STEPS = 3


def adapted(pipeline: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline.transformer.add_adapter(
            LoraConfig(r=2, lora_alpha=4, target_modules=["attn.to_q"], init_lora_weights=False)
        )
    return pipeline


def backbone(pipeline: Any, guidance: float = 1.0, **size: int) -> PipelineBackbone:
    return PipelineBackbone(pipeline, guidance=guidance, max_sequence_length=12, **size)


def draw(pipeline: Any, guidance: float = 1.0, **negative: str) -> Tensor:
    return pipeline(
        "a red circle",
        guidance_scale=guidance,
        num_inference_steps=STEPS,
        max_sequence_length=12,
        height=64,
        width=64,
        generator=torch.Generator().manual_seed(4),
        output_type="latent",
        **negative,
    ).images


def test_at_0_images_are_the_large_pipelines_bit_for_bit(load_tiny):
    large = load_tiny(family="flux")
    plain = draw(large)
    for strength in (0, 1):
        with Transfer(backbone(large), backbone(adapted(load_tiny())), strength).of("a red circle"):
            assert torch.equal(draw(large), plain) == (strength == 0)
    assert torch.equal(draw(large), plain) and "step" not in vars(large.scheduler)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_between_equal_pipelines_it_is_the_lora_itself(load_tiny, guidance):
    large, small = load_tiny(), adapted(load_tiny())
    for negative in ("", "a blue ring"):
        aligned = draw(small, guidance, negative_prompt=negative)
        assert (draw(large, guidance, negative_prompt=negative) - aligned).abs().max() > 0.01
        with Transfer(backbone(large, guidance), backbone(small, guidance)).of(
            "a red circle", negative
        ):
            drawn = draw(large, guidance, negative_prompt=negative)
        torch.testing.assert_close(drawn, aligned, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_each_velocity_gets_the_loras_change_at_the_same_latents(load_tiny, monkeypatch, strength):
    """FLUX packs its latents by hand here: (16, 8, 8) are 16 tokens of 16 channels x 2 x 2."""
    large, small = load_tiny(family="flux"), adapted(load_tiny())
    seen: list[tuple[Tensor, ...]] = []
    plain = type(large.scheduler).step

    def note(scheduler: Any, *step: Tensor, **options: Any) -> Any:
        seen.append(step)
        return plain(scheduler, *step, **options)

    monkeypatch.setattr(type(large.scheduler), "step", note)
    with Transfer(backbone(large), backbone(small), strength).of("a red circle"):
        draw(large)
    alone = backbone(load_tiny(family="flux"))
    cond_large = alone.encode(["a red circle"], [""])
    reference = backbone(small)
    cond = reference.encode(["a red circle"], [""])
    assert len(seen) == STEPS
    for v, t, x in seen:
        image = x.unflatten(1, (4, 4)).unflatten(-1, (16, 2, 2)).permute(0, 3, 1, 4, 2, 5)
        image = image.reshape(1, 16, 8, 8)
        with torch.no_grad():
            aligned = reference.velocity(image, t / 1000, cond)
            small.transformer.disable_adapters()
            base = reference.velocity(image, t / 1000, cond)
            small.transformer.enable_adapters()
            before = alone.velocity(x, t / 1000, cond_large)
        change = (aligned - base).unflatten(3, (4, 2)).unflatten(2, (4, 2))
        change = change.permute(0, 2, 4, 1, 3, 5).reshape(1, 16, 64)
        assert change.abs().max() > 0.01
        torch.testing.assert_close(v, before + strength * change, rtol=0, atol=1e-5)


def test_what_cannot_be_added_is_refused(load_tiny):
    large = load_tiny(family="flux")
    with pytest.raises(UserError, match="class AutoencoderDC, that of .* AutoencoderKL"):
        Transfer(backbone(load_tiny(family="sana")), backbone(adapted(load_tiny())))
    other = adapted(load_tiny())
    other.vae = copy.deepcopy(other.vae)
    other.vae.register_to_config(scaling_factor=0.5)
    with pytest.raises(UserError, match=r"scaling_factor 0\.8361, that of .* 0\.5"):
        Transfer(backbone(large), backbone(other))
    with pytest.raises(UserError, match=r"\(16, 8, 8\) from .* \(16, 4, 4\)"):
        Transfer(backbone(large), backbone(adapted(load_tiny()), height=32, width=32))
    with pytest.raises(UserError, match="has no active LoRA"):
        Transfer(backbone(large), backbone(load_tiny()))
    with pytest.raises(UserError, match="expected a finite number"):
        Transfer(backbone(large), backbone(adapted(load_tiny())), float("nan"))

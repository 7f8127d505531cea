"""RLG on other networks than a transformer of flowrl's own pipelines: any with adapters of PEFT."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.backbones.guidance import RLG
from flowrl.errors import UserError
from flowrl.functional.sde import extrapolate


def inject(network: torch.nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    inject_adapter_in_model(config, network)


def test_other_networks_with_adapters_are_guided_or_refused():
    # Other networks with adapters are guided or refused.
    # A cache between calls is refused.
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    network.is_cache_enabled = True  # type: ignore[assignment]
    inject(network)
    with pytest.raises(UserError, match="disable_cache"), RLG(SimpleNamespace(unet=network)):
        pass
    # A list of outputs is combined one by one. Some transformers return a latent for each
    # image, since sizes may differ.

    class Ragged(torch.nn.Sequential):
        def forward(self, x: list[Tensor]) -> tuple[list[Tensor], str]:  # type: ignore[override]
            return [self[0](row) for row in x], "more"

    network, x = Ragged(torch.nn.Linear(2, 2)), [torch.randn(1, 2), torch.randn(3, 2)]
    base = network(x)[0]
    inject(network)
    expected = [extrapolate(b, a, 0.4) for b, a in zip(base, network(x)[0], strict=True)]
    with RLG(SimpleNamespace(transformer=network), 0.4):
        found, more = network(x)
    assert all(map(torch.equal, found, expected)) and more == "more"
    # Two denoisers are both guided. As of pipelines that change the network halfway.
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    x = torch.randn(3, 2)
    bases = [network(x) for network in (first, second)]
    for network in (first, second):
        inject(network)
    pipeline = SimpleNamespace(transformer=first, transformer_2=second)
    expected = [extrapolate(b, n(x), 2.0) for b, n in zip(bases, (first, second), strict=True)]
    with RLG(pipeline, 2.0):
        assert torch.equal(first(x), expected[0]) and torch.equal(second(x), expected[1])
    # What is put around it inside stays and is guided no more.
    network, x = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.randn(3, 2)
    base = network(x)
    inject(network)
    aligned, seen = network(x), []
    with RLG(SimpleNamespace(unet=network), 2.0):
        guided = network.forward

        def watched(x: Tensor) -> Tensor:
            seen.append(1)
            return guided(x)

        network.forward = watched
        assert torch.equal(network(x), extrapolate(base, aligned, 2.0))
    assert torch.equal(network(x), aligned) and len(seen) == 2


def test_hooks_that_come_and_go_inside_stay_as_they_are():
    for before in [False, True]:
        for after in [False, True]:
            from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

            class Counting(ModelHook):
                calls = 0

                def pre_forward(self, module, *args, **kwargs):
                    self.calls += 1
                    return args, kwargs

            network, x, hook = (
                torch.nn.Sequential(torch.nn.Linear(2, 2)),
                torch.randn(3, 2),
                Counting(),
            )
            base = network(x)
            inject(network)
            aligned, own = network(x), network.forward
            expected = extrapolate(base, aligned, 2.0)
            if before:
                add_hook_to_module(network, hook)
            with RLG(SimpleNamespace(unet=network), 2.0):
                assert torch.equal(network(x), expected)
                remove_hook_from_module(network)
                assert torch.equal(network(x), expected)
                if after:
                    add_hook_to_module(network, hook)
                    assert torch.equal(network(x), expected)
            assert hook.calls == before + after  # once for both forwards
            assert torch.equal(network(x), aligned) and hook.calls == before + 2 * after
            remove_hook_from_module(network)
            assert network.forward == own and not hasattr(network, "_old_forward")


@pytest.fixture(scope="module")
def diffusion() -> Any:
    """A Stable Diffusion pipeline with random weights: a U-Net that predicts noise."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from diffusers import UNet2DConditionModel as UNet

    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=8,
            norm_num_groups=4,
            attention_head_dim=4,
        )
        vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),  # type: ignore[arg-type]
        text_encoder=None,  # type: ignore[arg-type]  # it is given embeddings
        tokenizer=None,  # type: ignore[arg-type]
        safety_checker=None,  # type: ignore[arg-type]
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_a_unet_that_predicts_noise_is_guided_too(diffusion):
    from peft import LoraConfig

    embeds = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2))

    def latents() -> Tensor:
        return diffusion(
            prompt_embeds=embeds,
            negative_prompt_embeds=-embeds,
            guidance_scale=2.0,
            num_inference_steps=1,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
        ).images

    base = latents()
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        diffusion.unet.add_adapter(config)
    aligned = latents()
    assert (aligned - base).abs().max() > 0.01
    found = {}
    for strength in (0, 1, 1.5):
        with RLG(diffusion, strength):
            found[strength] = latents()
    assert torch.equal(found[0], base) and torch.equal(found[1], aligned)
    # One deterministic step is affine in the noise that the network predicts.
    torch.testing.assert_close(found[1.5], base + 1.5 * (aligned - base), rtol=1e-4, atol=1e-4)
    assert torch.equal(latents(), aligned)

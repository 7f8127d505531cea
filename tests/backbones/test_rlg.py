"""A pipeline under RLG: its base at 0, its LoRA at 1, others beyond, itself after."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from flowrl.backbones.guidance import RLG
from flowrl.errors import UserError
from flowrl.functional.sde import extrapolate

STEPS = 3


def add_lora(network: Any, *targets: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network.add_adapter(
            LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights=False)
        )


def draw(pipeline: Any, guidance: float = 3.0, **settings: Any) -> Tensor:
    return pipeline(
        "a red circle",
        negative_prompt="a blue ring",
        guidance_scale=guidance,
        num_inference_steps=STEPS,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(4),
        output_type="latent",
        **settings,
    ).images


@pytest.fixture
def pipeline(load_tiny) -> Any:
    pipeline = load_tiny()
    add_lora(pipeline.transformer, "attn.to_q", "attn.to_v", "attn.add_k_proj")
    return pipeline


def test_at_0_and_1_images_are_the_bases_and_the_loras_bit_for_bit(load_tiny, pipeline):
    plain = load_tiny()
    for guidance in [1.0, 3.0]:
        base, aligned = draw(plain, guidance), draw(pipeline, guidance)
        assert (aligned - base).abs().max() > 0.01
        with RLG(pipeline, strength=0):
            assert torch.equal(draw(pipeline, guidance), base)
        with RLG(pipeline, strength=1):
            assert torch.equal(draw(pipeline, guidance), aligned)
        with RLG(pipeline, strength=3.0):
            assert (draw(pipeline, guidance) - aligned).abs().max() > 0.01


def traits(pipeline: Any) -> tuple:
    network = pipeline.transformer
    layers = [m for m in network.modules() if hasattr(m, "lora_A")]
    return (
        "forward" in vars(network),
        [layer.disable_adapters for layer in layers],
        [p.requires_grad for p in network.parameters()],
        [layer.active_adapters for layer in layers],
    )


def test_afterwards_the_pipeline_is_as_it_was_also_after_an_error(pipeline):
    before, aligned = traits(pipeline), draw(pipeline)
    with RLG(pipeline, 2.0):
        pass
    assert traits(pipeline) == before
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 4:  # the second step, LoRA off
            raise RuntimeError("out of memory")

    hook = next(pipeline.transformer.children()).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), RLG(pipeline, 2.0):
        draw(pipeline)
    hook.remove()
    assert traits(pipeline) == before
    assert torch.equal(draw(pipeline), aligned)


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_holds_for_every_image_of_an_offloaded_pipeline(pipeline, inside):
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):  # shared by all tests
        setattr(pipeline, name, copy.deepcopy(getattr(pipeline, name)))
    aligned = draw(pipeline)
    with RLG(pipeline, 1.5):
        guided = draw(pipeline)
    network = pipeline.transformer
    own = network.forward
    if not inside:
        pipeline.enable_model_cpu_offload(device="cpu")
    with RLG(pipeline, 1.5):
        if inside:
            pipeline.enable_model_cpu_offload(device="cpu")
        hooked = network.forward
        assert torch.equal(draw(pipeline), guided) and network.forward is not hooked
        assert torch.equal(draw(pipeline), guided)
        with pytest.raises(UserError, match="already at work"), RLG(pipeline, 2.0):
            pass
    assert hasattr(network, "_hf_hook") and network._old_forward == own
    assert torch.equal(draw(pipeline), aligned) and torch.equal(draw(pipeline), aligned)
    with RLG(pipeline, 1.5):
        assert torch.equal(draw(pipeline), guided)


def adapted_text(pipeline: Any) -> None:
    pipeline.text_encoder = copy.deepcopy(pipeline.text_encoder)  # shared by all tests
    # transformers' own `add_adapter` may ask for a PEFT that is not released yet (5.24: 0.22)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), pipeline.text_encoder)


def test_where_the_base_cannot_be_had_it_says_so(load_tiny):
    for strength in (float("nan"), float("inf")):
        with (
            pytest.raises(UserError, match="expected a finite number"),
            RLG(SimpleNamespace(), strength),
        ):
            pass
    for spoil, says in (
        (lambda pipeline: pipeline.unload_lora_weights(), "has no active LoRA"),
        (lambda pipeline: pipeline.transformer.disable_adapters(), "has no active LoRA"),
        (lambda pipeline: pipeline.fuse_lora(components=["transformer"]), "fused into transformer"),
        (adapted_text, "also adapts text_encoder"),
    ):
        pipeline = load_tiny()
        add_lora(pipeline.transformer, "attn.to_q")
        spoil(pipeline)
        with pytest.raises(UserError, match=says), RLG(pipeline):
            pass
        assert "forward" not in vars(pipeline.transformer)


def inject(network: torch.nn.Module) -> None:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    inject_adapter_in_model(config, network)


def test_other_networks_with_adapters_are_guided_or_refused():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    network.is_cache_enabled = True  # type: ignore[assignment]
    inject(network)
    with pytest.raises(UserError, match="disable_cache"), RLG(SimpleNamespace(unet=network)):
        pass
    # A list of outputs is combined one by one. Some transformers return a latent for each
    # image, since sizes may differ. Two denoisers are both guided, as of pipelines that change
    # the network halfway.

    class Ragged(torch.nn.Sequential):
        def forward(self, x: list[Tensor]) -> tuple[list[Tensor], str]:  # type: ignore[override]
            return [self[0](row) for row in x], "more"

    first, second = Ragged(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    rows, x = [torch.randn(1, 2), torch.randn(3, 2)], torch.randn(3, 2)
    bases = [*first(rows)[0], second(x)]
    for network in (first, second):
        inject(network)
    aligned = [*first(rows)[0], second(x)]
    for strength in (0.4, 2.0):
        expected = [extrapolate(b, a, strength) for b, a in zip(bases, aligned, strict=True)]
        with RLG(SimpleNamespace(transformer=first, transformer_2=second), strength):
            found, more = first(rows)
            assert all(map(torch.equal, [*found, second(x)], expected)) and more == "more"

"""Gradient checkpointing: the same gradients from fewer saved bytes."""

import pytest
import torch

from flowrl.backbones.loading import enable_gradient_checkpointing, load_pipeline
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.prompts.records import load_prompts


@pytest.fixture(scope="module", params=["sd3", "flux", "sana"])
def case(request):
    pipeline = load_pipeline(f"tiny-{request.param}", dtype="fp32", device="cpu")
    backbone = PipelineBackbone(pipeline, guidance=3.5, max_sequence_length=12)
    policy = Policy(backbone, rank=4, alpha=8, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Weights of a pipeline may be zero where it is not trained yet, and hide what follows.
        for weight in policy.network.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    x = torch.randn(2, *backbone.latent_shape(), generator=generator)
    cond = TextCache(backbone)(load_prompts("tiny:all:train", limit=2))
    return policy, (x, torch.tensor(0.6), cond)


def learned(policy, inputs):
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy.velocity(*inputs).square().mean()
    gradients = torch.autograd.grad(loss, policy.parameters())
    return gradients, sum(kept.values())


def test_gradients_are_the_same_bit_for_bit_from_a_fraction_of_the_bytes(case):
    policy, inputs = case
    before, kept = learned(policy, inputs)
    drawn = policy.reference(*inputs)
    enable_gradient_checkpointing(policy.network)
    after, fewer = learned(policy, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert any(bool(gradient.any()) for gradient in after)
    assert fewer < kept / 2
    assert torch.equal(policy.reference(*inputs), drawn)

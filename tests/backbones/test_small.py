"""Small random pipelines of diffusers' classes: built offline, saved, loaded, and run."""

import diffusers
import torch

from flowrl.backbones.small import small_pipeline


def test_the_seed_decides_the_weights_and_the_generator_of_the_process_is_left_alone():
    kind, before = diffusers.ZImagePipeline, torch.random.get_rng_state()
    weights = [
        torch.cat([p.flatten() for p in small_pipeline(kind, seed).transformer.parameters()])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

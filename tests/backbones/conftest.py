"""What the tests of all backbones share: requests, images of the tiny world, both samplers."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.text_cache import TextCache
from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import load_prompts
from flowrl.sampling.rollout import RolloutRequest, sample_request
from flowrl.sampling.sampler import Schedule
from flowrl.tiny.draw import draw as draw_tiny
from flowrl.tiny.world import split_prompts
from flowrl.trees.plan import ode_plan
from flowrl.utils.images import to_tensor

sys.path.insert(0, str(Path(__file__).parent))  # scripts that tests start lie beside them

COUNT, STEPS = 4, 3
NEGATIVE = "a red circle"
FAMILIES = ("sd3", "flux", "sana")


@pytest.fixture(scope="module")
def request_() -> RolloutRequest:
    return RolloutRequest(
        prompts=load_prompts("tiny:all:test", limit=COUNT),
        prompt=torch.arange(COUNT),
        group=torch.arange(COUNT),
        root=torch.zeros(COUNT).long(),
        seed=3,
        iteration=0,
    )


@pytest.fixture(scope="module")
def tiny_images() -> Tensor:
    prompts = split_prompts("colors", "test")[:COUNT]
    return to_tensor([Image.fromarray(draw_tiny(p, Random(i))) for i, p in enumerate(prompts)])


@pytest.fixture(scope="module")
def load_alive(load_tiny: Callable[..., Any]) -> Callable[..., Any]:
    """A pipeline of a family that can be compared with ours.

    FLUX's without layers of zeros, which would hide what they are given; SANA's with the scheduler
    whose steps are flowrl's without noise.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    def load(family: str, dtype: str = "fp32") -> Any:
        pipeline = load_tiny(dtype, family)
        generator = torch.Generator().manual_seed(0)
        if family == "flux":
            for parameter in pipeline.transformer.parameters():
                if not parameter.any():
                    parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        if family == "sana":
            pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return pipeline

    return load


@pytest.fixture(scope="module")
def pipelines(load_alive: Callable[..., Any]) -> dict[str, Any]:
    return {family: load_alive(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def ours(request_: RolloutRequest) -> Callable[..., tuple[Any, Tensor]]:
    """(family, pipeline, guidance) -> our backbone and its clean latents, sampled without noise."""

    def sample(
        family: str, pipeline: Any, guidance: float = 3.5, tokens: int = 12, **size: int
    ) -> tuple[Backbone, Tensor]:
        made = PipelineBackbone(pipeline, guidance=guidance, max_sequence_length=tokens, **size)
        schedule = Schedule(sigmas=made.sigmas(STEPS), kernel=KERNELS["flow_sde"], noise_level=0.0)
        cond = TextCache(made, "" if family == "flux" else NEGATIVE)(request_.prompts)
        with torch.no_grad():
            tree = sample_request(
                made, made.velocity, cond, request_, ode_plan(STEPS), schedule, COUNT
            )
        return made, tree.leaves()

    return sample


@pytest.fixture(scope="module")
def theirs(request_: RolloutRequest) -> Callable[..., Tensor]:

    def sample(backbone: Any, output: str = "latent") -> Tensor:
        latents = request_.noise((), 0, "init", backbone.latent_shape())
        options = {"latents": latents.to(backbone.dtype)}
        if backbone.family.name == "sana":
            options = {"use_resolution_binning": False, "latents": latents}
        if backbone.family.name != "flux":
            options["negative_prompt"] = [NEGATIVE] * COUNT
        return backbone.pipeline(
            [p.text for p in request_.prompts],
            guidance_scale=backbone.guidance,
            num_inference_steps=STEPS,
            max_sequence_length=backbone.max_sequence_length,
            height=backbone.height,
            width=backbone.width,
            output_type=output,
            **options,
        ).images

    return sample

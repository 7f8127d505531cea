"""What the tests of all backbones share: requests, pictures of the tiny world, our sampler."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.backbones.text_cache import TextCache
from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import load_prompts
from flowrl.sampling.rollout import RolloutRequest, draw
from flowrl.sampling.sampler import Schedule
from flowrl.tiny.draw import draw as draw_tiny
from flowrl.tiny.world import split_prompts
from flowrl.trees.plan import ode_plan
from flowrl.utils.images import to_tensor

COUNT = 4


@pytest.fixture(scope="module")
def request_() -> RolloutRequest:
    """One tree of each of four prompts."""
    return RolloutRequest(
        prompts=load_prompts("tiny:all:test", limit=COUNT),
        prompt=torch.arange(COUNT),
        group=torch.arange(COUNT),
        root=torch.zeros(COUNT).long(),
        seed=3,
        iteration=0,
    )


@pytest.fixture(scope="module")
def drawn() -> Callable[[int], Tensor]:
    """Pictures of the tiny world, which the autoencoders know."""

    def draw(count: int) -> Tensor:
        prompts = split_prompts("colors", "test")[:count]
        return to_tensor([Image.fromarray(draw_tiny(p, Random(i))) for i, p in enumerate(prompts)])

    return draw


@pytest.fixture(scope="module")
def noiseless(request_: RolloutRequest) -> Callable[..., Tensor]:
    """Clean latents (4, *latent) of the request, drawn without noise in one batch."""

    def sample(backbone: Backbone, steps: int, negative: str = "") -> Tensor:
        schedule = Schedule(sigmas=backbone.sigmas(steps), kernel=KERNELS["flow_sde"], level=0.0)
        cond = TextCache(backbone, negative)(request_.prompts)
        with torch.no_grad():
            tree = draw(
                backbone, backbone.velocity, cond, request_, ode_plan(steps), schedule, COUNT
            )
        return tree.leaves()

    return sample


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="session", name="relative")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """|found - expected| / |expected|, of all entries."""
    return relative

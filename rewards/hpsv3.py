"""HPSv3: which image people prefer for a prompt (Ma et al. 2025, arXiv 2508.03789).

A Qwen2-VL-7B with a head for mean and spread (17 GB in bf16) from the authors' package `hpsv3`.
That package pins transformers and wants an environment of its own: start `flowrl reward-serve`
there and score through it, see docs/reward-servers.md.

Tested against the interface of that package alone, not with its weights.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from .images import to_uint8
from .networks.loading import building, device_of, fetching, imported

MODEL = "MizzenAI/HPSv3"
HINT = "HPSv3 (in an environment of its own, see docs/reward-servers.md)"


class HPSv3:
    """The mean of the predicted preference, about 0 to 15; its spread is not used.

    checkpoint, config: files of another model than the published one.
    """

    name = "hpsv3"
    bounds = (None, None)
    differentiable = False

    def __init__(
        self, *, checkpoint: str | None = None, config: str | None = None, device: str = "auto"
    ):
        self.checkpoint, self.config, self.device = checkpoint, config, device
        self.version = f"hpsv3-1/{checkpoint or MODEL}/bf16"

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32."""
        from PIL import Image

        files = [Image.fromarray(image) for image in to_uint8(images)]
        # By name: the package has changed the order of these two.
        found = self._network.reward(prompts=list(prompts), image_paths=files)
        return found[:, 0].float()

    def fixtures(self) -> list[dict]:
        from .prompt_fixtures import red_and_blue

        return red_and_blue()

    @functools.cached_property
    def _network(self) -> Any:
        load = imported("hpsv3:HPSv3RewardInferencer", HINT)
        with building(), fetching(self.checkpoint or MODEL):
            return load(
                config_path=self.config,
                checkpoint_path=self.checkpoint,
                device=str(device_of(self.device)),
            )

"""DINOv2 (Oquab et al. 2023, arXiv 2304.07193): an image as a unit vector, without any text.

transformers' own network; code and weights Apache-2.0.
"""

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .loading import DTYPES, building, check_dtype, device_of, fetching, imported
from .preprocess import Preprocess
from .sharing import shared

VIT_B14 = "facebook/dinov2-base"
SIZE = 224
PREPROCESS = Preprocess(  # shortest side to 256 and the middle of it, by ImageNet's mean and std
    mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), shortest=256
)


class Dinov2:
    """A DINOv2 by its name on the Hugging Face hub, or in a folder; loaded when first used."""

    def __init__(self, model: str = VIT_B14, *, device: str = "auto", dtype: str = "fp32"):
        self.model, self.device, self.dtype = model, device, check_dtype(dtype)
        self._shared = shared(("dinov2", model, device, dtype), self)

    @property
    def version(self) -> str:
        """What changes its vectors, in one string."""
        return f"{self.model}/{self.dtype}"

    def images(self, images: Tensor) -> Tensor:
        """Unit vectors of images (B, 3, H, W) in [0, 1]: (B, D) float32."""
        return self._shared.recall("images", images, lambda: self._seen(images))

    def _seen(self, images: Tensor) -> Tensor:
        network = self._network
        pixels = PREPROCESS(images.to(network.device), SIZE).to(network.dtype)
        return F.normalize(network(pixel_values=pixels).pooler_output.float(), dim=-1)

    @functools.cached_property
    def _network(self) -> Any:
        return self._shared.load(self._load)

    def _load(self) -> Any:
        kind = imported("transformers:Dinov2Model", "image likeness")
        with building(), fetching(self.model):
            network = kind.from_pretrained(self.model)
        network = network.eval().requires_grad_(False)
        return network.to(device_of(self.device), DTYPES[self.dtype])

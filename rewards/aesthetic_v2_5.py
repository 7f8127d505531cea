"""Aesthetic Predictor v2.5: how beautiful people would find an image, 1 to 10, from 5.5 on great.

Five linear layers on the unit vector of SigLIP so400m at 384 pixels (428 M parameters, 1.7 GB in
fp32; Apache-2.0). The head's file comes from its author's repository, where code and weights are
under the AGPL-3.0; this file has neither, it follows the layout of the weights: see
https://github.com/discus0434/aesthetic-predictor-v2-5.
"""

import functools
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .networks.linear_head import linear_head
from .networks.loading import (
    DTYPES,
    building,
    check_dtype,
    device_of,
    fetching,
    imported,
    read_weights,
    weights_file,
)
from .networks.preprocess import NAME, Preprocess
from .networks.sharing import shared

MODEL = "google/siglip-so400m-patch14-384"
FILE = "aesthetic_predictor_v2_5.pth"
SOURCE = "https://github.com/discus0434/aesthetic-predictor-v2-5 (models/, AGPL-3.0)"
BETWEEN = (1024, 128, 64, 16, 1)  # widths after that of the image's vector
LAYERS = (0, 2, 4, 6, 8)  # their numbers in the published file: dropout had numbers of its own
PREPROCESS = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3, squash=True)  # SigLIP's


class AestheticV25:
    """Mostly 3 to 7 for real images; nothing keeps it within 1 and 10. The prompt is not read.

    head: the file aesthetic_predictor_v2_5.pth, or its folder. model: the SigLIP, a name on the
    Hugging Face hub or a folder.
    """

    name = "aesthetic_v2_5"
    differentiable = True

    def __init__(
        self,
        head: str | None = None,
        *,
        model: str = MODEL,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.head, self.model, self.revision = head, model, revision
        self.device, self.dtype = device, check_dtype(dtype)
        self._shared = shared(("siglip", model, revision, device, dtype), self)
        named = f"{model}@{revision}" if revision else model
        self.version = f"aesthetic-v2.5-1/{named}/{dtype}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32."""
        head = self._head  # first: a missing file is cheaper to see than a network to load
        return head(self._shared.recall("pooled", images, lambda: self._seen(images))).squeeze(-1)

    def _seen(self, images: Tensor) -> Tensor:
        network = self._network
        pixels = PREPROCESS(images.to(network.device), network.config.image_size)
        pooled = network(pixel_values=pixels.to(network.dtype)).pooler_output
        return F.normalize(pooled.float(), dim=-1)

    @functools.cached_property
    def _network(self) -> Any:
        return self._shared.load(self._load)

    def _load(self) -> Any:
        kind = imported("transformers:SiglipVisionModel", "Aesthetic v2.5")
        with building(), fetching(self.model):
            network = kind.from_pretrained(self.model, revision=self.revision)
        network = network.eval().requires_grad_(False)
        return network.to(device_of(self.device), DTYPES[self.dtype])

    @functools.cached_property
    def _head(self) -> nn.Sequential:
        if self.head is None or not Path(self.head).exists():
            raise FileNotFoundError(
                f"Aesthetic v2.5 needs the file {FILE}, which is not on this machine: take it from "
                f"{SOURCE} and give its path as `head` (got {self.head!r})"
            )
        path = weights_file(self.head, FILE)
        widths = (self._network.config.hidden_size, *BETWEEN)
        head = linear_head(
            read_weights(path), path, what="head of Aesthetic v2.5",
            widths=widths, prefix="scoring_head.", numbers=LAYERS,
        )  # fmt: skip
        return head.to(device_of(self.device))

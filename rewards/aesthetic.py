"""The LAION aesthetic score, v1 head: how beautiful people would find an image, from 1 to 10.

Five linear layers with nothing between them on the unit vector of OpenAI's CLIP ViT-L/14. The
head's weights are the ones trained on the SAC, LAION-Logos and AVA ratings (Apache-2.0; the CLIP's
are under the MIT licence).
"""

import functools
from collections import OrderedDict
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from .networks.clip import VIT_L14, Clip
from .networks.loading import building, device_of, fit, read_weights, under, weights_file
from .networks.preprocess import NAME

HEAD = "trl-lib/ddpo-aesthetic-predictor"
FILE = "aesthetic-model.pth"
WIDTHS = (768, 1024, 128, 64, 16, 1)
# The layers' numbers in the published file: dropout had numbers of its own.
LAYERS = ("0", "2", "4", "6", "7")


class Aesthetic:
    """Mostly 4 to 7 for real images; nothing keeps it within 1 and 10. The prompt is not read.

    model: the CLIP, a name on the Hugging Face hub or a folder. head: a name there, a folder with
    the file aesthetic-model.pth, or such a file. clip: other arguments of `Clip`: revision, device,
    dtype.
    """

    name = "aesthetic"
    differentiable = True

    def __init__(self, *, model: str = VIT_L14, head: str = HEAD, **clip: Any):
        self.head = head
        self.clip = Clip(model, reward="Aesthetic", **clip)
        self.version = f"aesthetic-1/{head}/{self.clip.version}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return self._head(self.clip.images(images)).squeeze(-1)

    @functools.cached_property
    def _head(self) -> nn.Sequential:
        path = weights_file(self.head, FILE)
        with building():
            layers = [nn.Linear(*pair) for pair in pairwise(WIDTHS)]
        head = nn.Sequential(OrderedDict(zip(LAYERS, layers, strict=True))).requires_grad_(False)
        fit(head, under(read_weights(path), "layers."), path, "the aesthetic head")
        return head.to(device_of(self.clip.device))

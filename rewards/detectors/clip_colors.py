"""The colours of found objects by CLIP, by the rule of the GenEval paper (Ghosh et al. 2023,
arXiv 2310.11513): zero-shot among ten names, on the object alone before a grey background."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..geneval_rules import COLORS, Detection
from ..networks.clip import VIT_L14, Clip

TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
BACKGROUND = 0x99


class ClipColors:
    """(H, W, 3) uint8 RGB and some of its Detections -> the name of each one's colour.

    What the mask leaves out becomes grey, the box is cut out, and the colour is the one whose
    text lies nearest: the mean of three templates' unit vectors, again of unit length. An object
    without a mask keeps its background. Never None: CLIP always prefers one name. clip: other
    arguments of `Clip`: revision, device, dtype.
    """

    colors = COLORS

    def __init__(self, model: str = VIT_L14, **clip: Any):
        self.clip = Clip(model, reward="the colours of GenEval", **clip)

    def load(self) -> None:
        """Load the weights. Raises FileNotFoundError when they are not there."""
        self._texts("object")

    @torch.no_grad()
    def __call__(self, picture: np.ndarray, detections: Sequence[Detection]) -> list[str]:
        names = []
        for detection in detections:
            pixels = torch.from_numpy(cut_out(picture, detection)).permute(2, 0, 1)[None]
            image = self.clip.images(pixels.float() / 255)[0]
            names.append(self.colors[int((self._texts(detection.name) @ image).argmax())])
        return names

    def _texts(self, name: str) -> Tensor:
        """Return unit vectors (colours, D) of the colours that an object of that name may have."""
        texts = [t.format(color=c, name=name) for c in self.colors for t in TEMPLATES]
        vectors = self.clip.texts(texts).unflatten(0, (len(self.colors), len(TEMPLATES)))
        return F.normalize(vectors.mean(1), dim=-1)


def cut_out(image: np.ndarray, detection: Detection) -> np.ndarray:
    """Return the object's box in an image (H, W, 3), grey outside of its mask: (h, w, 3) uint8."""
    if detection.mask is not None:
        image = np.where(detection.mask[..., None], image, np.uint8(BACKGROUND))
    left, top, right, bottom = detection.box
    x, y = max(math.floor(left), 0), max(math.floor(top), 0)
    return np.ascontiguousarray(
        image[y : max(math.ceil(bottom), y + 1), x : max(math.ceil(right), x + 1)]
    )

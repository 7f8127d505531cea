"""A small learned reward for the tiny world, with weaknesses that are known and published.

A network was trained for seconds on few drawn images of training requests, right ones and ones
with a planted defect, to say whether an image shows what was asked for. Trained against for long,
its score and the exact judges' part: it stands for the learned preference models that alignment
over-optimises. What it gets wrong on fresh drawings is printed by
`python -m scripts.pretrain_tiny.proxy`, which made it.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .detectors.tiny_shapes import SHAPES
from .fixtures import fixture, shapes
from .networks.loading import small_network
from .tiny_palette import COLORS

SIDE = 64  # pixels
PLACES = ("top left", "top right", "bottom left", "bottom right")
RELATIONS = ("left of", "right of", "above", "below")
ENTRY = len(SHAPES) + len(COLORS) + len(PLACES) + len(RELATIONS) + 2  # numbers for one object
WEIGHTS = Path(__file__).parent / "weights" / "tiny_proxy.safetensors"
WIDTH = 16


class ProxyNetwork(nn.Module):
    """Images and requests -> one logit each."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, WIDTH, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 5, stride=4, padding=2),
            nn.GELU(),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * WIDTH * 16, 96),
        )
        self.request = nn.Sequential(nn.Linear(2 * ENTRY, 96), nn.GELU(), nn.Linear(96, 96))
        self.head = nn.Sequential(nn.Linear(3 * 96, 96), nn.GELU(), nn.Linear(96, 1))

    def forward(self, images: Tensor, requests: Tensor) -> Tensor:
        """images (B, 3, 64, 64) in [0, 1], requests (B, 2 * ENTRY) -> (B,)."""
        image, request = self.image(images * 2 - 1), self.request(requests)
        return self.head(torch.cat([image, request, image * request], 1))[:, 0]


def request_numbers(wanted: dict) -> Tensor:
    """Describe the first two objects of a request: (2 * ENTRY,)."""
    rows = []
    for entry in [*wanted["include"], {}][:2]:
        values = [
            (SHAPES, entry.get("class")),
            (COLORS, entry.get("color")),
            (PLACES, entry.get("place")),
            (RELATIONS, (entry.get("position") or [None])[0]),
        ]
        row = [float(value == name) for names, value in values for name in names]
        rows += [*row, float(entry.get("size") == "small"), entry.get("count", 0) / 4]
    return torch.tensor(rows)


class TinyProxy:
    """A guess, in [0, 1], whether an image shows what a prompt of the tiny world asks for.

    For prompts with `include`, GenEval's form; NaN for others. Gradients reach the images.
    """

    name = "tiny_proxy"
    bounds = (0.0, 1.0)
    differentiable = True
    version = "tiny-proxy-1"

    @functools.cached_property
    def _network(self) -> ProxyNetwork:
        return small_network(ProxyNetwork, WEIGHTS)

    def applies(self, prompt: str, metadata: dict) -> bool:
        return bool(metadata.get("include"))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        network = self._network.to(images.device)
        if images.shape[-2:] != (SIDE, SIDE):
            images = F.interpolate(images.float(), (SIDE, SIDE), mode="area")
        applies = [self.applies("", wanted) for wanted in metadata]
        nothing = torch.zeros(2 * ENTRY)
        wanted = [
            request_numbers(m) if a else nothing for m, a in zip(metadata, applies, strict=True)
        ]
        scores = network(images.float(), torch.stack(wanted).to(images.device)).sigmoid()
        return scores.masked_fill(~torch.tensor(applies, device=scores.device), torch.nan)

    def fixtures(self) -> list[dict]:
        wanted = {"include": [{"class": "circle", "count": 1, "color": "red"}]}
        right, wrong = (shapes([("circle", c), None, None, None]) for c in ("red", "blue"))
        return [
            fixture("the right colour scores above another", right, wrong, "a red circle", wanted)
        ]

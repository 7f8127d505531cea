"""Clean paper, crisp outlines, pure ink: how well made an image of the tiny world is.

Every pixel of a drawn image is a mix of the paper and of one ink. The amount of ink in each
pixel therefore says where objects are, how sharp their outlines are, and whether the paper is
bare; what no such mix explains is a colour that no drawing has.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .fixtures import blank, fixture, noise, shapes
from .images import to_uint8
from .tiny_palette import COLORS, PAPER

INKS = tuple(COLORS.values())
OVERSHOOT = 0.2  # drawn edges ring: their pixels lie up to this far beyond paper and ink
SOLID = 0.75  # ink of a pixel that belongs to an object
# For each flaw: what 95% of drawn images stay below, and how much more halves its part. `flaws`
# on 1050 drawn images (150 of each kind) gives the first; the second put the tiny-sd3
# of an earlier version, before training, in the middle of the scale.
LIMITS = ((0.32, 2.0), (0.03, 0.05), (0.3, 3.0))
LEAST, MOST = 0.02, 0.54  # ink of those images: all lie between, as a share of their pixels
EXCESS = 0.1  # of ink beyond MOST that divides the score by e


class TinyQuality:
    """1 = noise, or nothing at all; 5 = as the drawing program draws. The prompt plays no part.

    The score is 1 + 4 p a. p is the geometric mean of three parts 1 / (1 + e), with e a flaw
    (see `flaws`) beyond what drawn images have, in a unit of its own: no virtue makes up for a
    gross flaw. a in [0, 1] judges the amount of ink: 1 where drawings lie, 0 for a blank image
    and near 0 for one full of ink.
    Made for images of 64 x 64, of shapes and of words. Shape itself is not judged: a crisp blob
    of one ink is well made.
    """

    name = "tiny_quality"
    bounds = (1.0, 5.0)
    differentiable = False
    version = "tiny-quality-2"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Score images (B, 3, H, W) in [0, 1]: (B,) float32 on the CPU; NaN never."""
        amounts, amount = flaws(torch.from_numpy(to_uint8(images)).permute(0, 3, 1, 2).float())
        allowed, unit = torch.tensor(LIMITS).unbind(1)
        parts = torch.exp(-torch.log1p((amounts - allowed).clamp(min=0) / unit).mean(1))
        enough = (amount / LEAST).clamp(max=1)
        spare = torch.exp(-(amount - MOST).clamp(min=0) / EXCESS)
        return 1 + 4 * parts * enough * spare

    def fixtures(self) -> list[dict]:
        drawing = shapes([("star", "red"), ("square", "blue")])
        return [
            fixture("a clean drawing scores above noise", drawing, noise(64)),
            fixture("a clean drawing scores above blank paper", drawing, blank(64)),
        ]


def flaws(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is wrong in levels (B, 3, H, W) in 0..255: flaws (B, 3), amount of ink (B,) in
    [0, 1].

    Dirt: mean RGB distance from the paper of the pixels more than two away from solid ink; 416,
    the largest distance there is, when there are none.
    Softness: 1 - the range of ink within one pixel, as a mean over pixels between paper and ink,
    weighted by (4 ink (1 - ink))^2; 0 for steps from paper to ink, near 1 for blurred or pale
    objects and, since they are less than one ink, for hues between two inks.
    Impurity: mean RGB distance from the nearest mix of paper and one ink, weighted by ink.
    """
    ink, impure, dirty = _mix(levels)
    bare = (_highest(ink, 2) < SOLID).float()
    between = (4 * ink * (1 - ink)) ** 2
    step = _highest(ink, 1) + _highest(-ink, 1)
    dirt = _mean(dirty, bare).where(bare.flatten(1).any(1), 416.0)
    softness = _mean(1 - step, between)
    return torch.stack([dirt, softness, _mean(impure, ink)], 1), ink.flatten(1).mean(1)


def _mix(levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each pixel's ink in [0, 1], and its RGB distances from that mix and from the paper."""
    paper = torch.tensor(PAPER).float()
    inks = torch.tensor(INKS).float() - paper  # (6, 3)
    offset = levels - paper[:, None, None]
    along = torch.einsum("bchw,kc->bkhw", offset, inks)
    square = inks.square().sum(1)[:, None, None]
    share = (along / square).clamp(-OVERSHOOT, 1 + OVERSHOOT)
    from_paper = offset.square().sum(1, keepdim=True)
    apart, nearest = (from_paper + share * (share * square - 2 * along)).min(1)
    ink = share.gather(1, nearest[:, None])[:, 0].clamp(0, 1)
    return ink, apart.clamp(min=0).sqrt(), from_paper[:, 0].sqrt()


def _highest(values: Tensor, radius: int) -> Tensor:
    """Convert (B, H, W) to (B, H, W): the highest value in the square of that radius."""
    return F.max_pool2d(values[:, None], 2 * radius + 1, stride=1, padding=radius)[:, 0]


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """Convert (B, H, W) to (B,): weighted mean, 0 where nothing has weight."""
    total = weight.flatten(1).sum(1)
    return (values * weight).flatten(1).sum(1) / total.clamp(min=1e-6)

"""Statistics of images that need no judge: light, colour, edges, and the grid of a decoder."""

import torch
from torch import Tensor
from torch.nn import functional as F

STATISTICS = (
    "brightness", "contrast", "saturation", "warmth", "tint", "clipped", "colourfulness",
    "sharpness", "flat", "grid",
)  # fmt: skip
LUMA = (0.299, 0.587, 0.114)  # of R, G, B (ITU-R BT.601)
LEVEL = 1 / 255  # one of 8 bits
THUMBNAIL = 8  # pixels a side
LARGEST = 256  # pixels a side, to which larger images are reduced first, but for their grid


def image_statistics(images: Tensor, period: int = 8) -> Tensor:
    """Return the STATISTICS (B, S) of images (B, 3, H, W) in [0, 1].

    brightness and contrast: mean and standard deviation of the luma. saturation: mean of the
    largest minus the smallest colour. warmth: red minus blue. tint: green minus the mean of both.
    clipped: share of values within a level of 0 or 1. colourfulness: Hasler and Suesstrunk 2003.
    sharpness: mean size of the luma's gradient. flat: share of pixels where it is below two levels.
    grid: see `grid_share`.

    Args:
        period: pixels of the cell that the decoder repeats.
    """
    images = images.to(torch.promote_types(images.dtype, torch.float32))
    grid = grid_share(luma_of(images), period)
    if (factor := max(images.shape[2:]) // LARGEST) > 1:
        images = F.avg_pool2d(images, factor)
    red, green, blue = images.unbind(1)
    luma = luma_of(images)
    edge = gradient_size(luma)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1).flatten(2)
    spread, shift = opponents.std(2, correction=0).norm(dim=1), opponents.mean(2).norm(dim=1)
    columns = [
        luma.mean((1, 2)),
        luma.std((1, 2), correction=0),
        (images.amax(1) - images.amin(1)).mean((1, 2)),
        (red - blue).mean((1, 2)),
        (green - (red + blue) / 2).mean((1, 2)),
        ((images <= LEVEL) | (images >= 1 - LEVEL)).to(images).mean((1, 2, 3)),
        spread + 0.3 * shift,
        edge.mean((1, 2)),
        (edge < 2 * LEVEL).to(images).mean((1, 2)),
        grid,
    ]
    return torch.stack(columns, 1)


def luma_of(images: Tensor) -> Tensor:
    """Return (B, H, W) of images (B, 3, H, W)."""
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(1)


def gradient_size(luma: Tensor) -> Tensor:
    """Return the size of the gradient (B, H, W) of luma (B, H, W), 0 across the last edges."""
    across = F.pad(luma.diff(dim=2), (0, 1))
    down = F.pad(luma.diff(dim=1), (0, 0, 0, 1))
    return (across.square() + down.square()).sqrt()


def grid_share(luma: Tensor, period: int) -> Tensor:
    """Return the share (B,) of the power of luma's Laplacian that repeats in every cell.

    By Parseval it is the power at multiples of the cell's frequency, a checkerboard's included. The
    Laplacian leaves ramps out; C cells of noise have 1 / C. Power below a level counts as none.
    """
    padded = F.pad(luma[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    around = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    period = min(period, *luma.shape[1:])
    high, wide = (size // period for size in luma.shape[1:])
    laplacian = (4 * luma - around)[:, : high * period, : wide * period]
    cells = laplacian.unflatten(2, (wide, period)).unflatten(1, (high, period))
    repeated = cells.mean((1, 3)).square().mean((1, 2))
    return repeated / (laplacian.square().mean((1, 2)) + LEVEL**2)


def thumbnails(images: Tensor) -> Tensor:
    """Return small images (B, 3, THUMBNAIL, THUMBNAIL), by the mean over areas."""
    return F.adaptive_avg_pool2d(images.to(torch.promote_types(images.dtype, torch.float32)),
                                 THUMBNAIL)  # fmt: skip


def light_layout(thumbnails: Tensor) -> Tensor:
    """Return how much brighter (B, 3) right half, upper half and middle of thumbnails are.

    Each less the rest of the image. thumbnails: (B, 3, h, w); the middle is half a side wide.
    """
    luma = luma_of(thumbnails)
    (left, right), (upper, lower) = luma.chunk(2, 2), luma.chunk(2, 1)
    high, wide = (size // 4 for size in luma.shape[1:])
    middle = torch.zeros_like(luma[0], dtype=torch.bool)
    middle[high:-high, wide:-wide] = True
    pairs = [
        right.mean((1, 2)) - left.mean((1, 2)),
        upper.mean((1, 2)) - lower.mean((1, 2)),
        luma[:, middle].mean(1) - luma[:, ~middle].mean(1),
    ]
    return torch.stack(pairs, 1)

"""The six ideal shapes of the tiny world, and the grid on which outlines are compared."""

import cv2
import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
HOLES = (0.5, 0.54, 0.58, 0.62, 0.66)  # inner radii of rings, whose width varies most when small
GRID = 40  # samples a side
SPAN = 1.05  # half side of the grid, in units of the square root of the shape's area
AREA = (GRID / (2 * SPAN)) ** 2  # samples that every normalised shape covers


def normalise(alpha: np.ndarray) -> np.ndarray:
    """Return a soft mask (h, w) moved to its centre of mass and scaled to unit area: (GRID *
    GRID,).
    """
    moments = cv2.moments(alpha)
    scale = (AREA / moments["m00"]) ** 0.5
    x, y = moments["m10"] / moments["m00"], moments["m01"] / moments["m00"]
    middle = (GRID - 1) / 2
    matrix = np.array([[scale, 0, middle - scale * x], [0, scale, middle - scale * y]])
    return cv2.warpAffine(alpha, matrix, (GRID, GRID), flags=cv2.INTER_LINEAR).ravel()


def ideal_shapes() -> tuple[list[str], np.ndarray]:
    """Return names and normalised masks (10, GRID * GRID) of the shapes; the ring comes in five
    widths.
    """
    y, x = np.mgrid[-1.5:1.5:300j, -1.5:1.5:300j].astype(np.float32)
    radius, far, near = np.hypot(x, y), np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
    masks = [
        radius < 1,
        far < 1,
        (y < 0.85) & (abs(x) < (y + 1) / 1.85),
        radius < _star_outline(np.arctan2(x, -y)),
        (far < 1) & (near < 0.34),
        *((radius < 1) & (radius > hole) for hole in HOLES),
    ]
    names = [*SHAPES, *SHAPES[-1:] * (len(HOLES) - 1)]
    # Blurred by a twentieth of the radius: half a pixel on an object of twenty pixels.
    soft = [cv2.GaussianBlur(mask.astype(np.float32), (0, 0), 5) for mask in masks]
    return names, np.stack([normalise(mask) for mask in soft])


def _star_outline(angle: np.ndarray) -> np.ndarray:
    """Return radius of a five-pointed star that points up, at an angle from its top."""
    phi = np.abs(np.mod(angle + np.pi / 5, 2 * np.pi / 5) - np.pi / 5)  # 0 at a tip
    tip, notch = 1.08, 0.46 * np.exp(1j * np.pi / 5)  # real axis through the tip
    edge = notch - tip
    return -tip * edge.imag / (np.sin(phi) * edge.real - np.cos(phi) * edge.imag)

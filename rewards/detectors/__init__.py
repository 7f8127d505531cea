"""What finds objects and what names their colours, for the reward `geneval`, by name.

A detector is called with images (B, H, W, 3) uint8 RGB and returns a list of Detections for each
of them. Its attributes, all optional:

    threshold, counting_threshold  which scores count; of counting prompts, and of all others
    floor    it does not report what it is less sure of
    classes  the names that it can find
    colors   the colours that it tells itself, () when none
    load     (), brings the weights; what it raises concerns all images

What names colours is called with one image (H, W, 3) and some of its Detections, and returns
for each the name of its colour, or None when it is not sure. It may have `colors` and `load`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..geneval_rules import Detection

Detector = Callable[..., Sequence[Sequence[Detection]]]
ColorNamer = Callable[[np.ndarray, Sequence[Detection]], Sequence[str | None]]

DETECTORS = {
    "tiny": f"{__name__}.tiny:TinyDetector",
    "mask2former": f"{__name__}.mask2former:Mask2FormerDetector",
}
COLOR_NAMERS = {
    "clip": f"{__name__}.clip_colors:ClipColors",
}


def load_detector(name: str, args: Mapping[str, Any] | None = None) -> Detector:
    """Return the detector of that name in DETECTORS, or of "module:attribute", called with args.

    Raises ValueError for a name that is neither.
    """
    return _load("detector", DETECTORS, name, args)


def load_color_namer(name: str, args: Mapping[str, Any] | None = None) -> ColorNamer:
    """Return what names colours, from COLOR_NAMERS or "module:attribute"; see `load_detector`."""
    return _load("way to tell colours", COLOR_NAMERS, name, args)


def _load(what: str, names: Mapping[str, str], name: str, args: Mapping[str, Any] | None) -> Any:
    module, colon, attribute = names.get(name, name).partition(":")
    if not colon:
        raise ValueError(f"unknown {what} {name!r}: use {', '.join(names)}, or 'module:attribute'")
    return getattr(importlib.import_module(module), attribute)(**(args or {}))


def detect(find: Detector, images: np.ndarray) -> Sequence[Sequence[Detection] | Exception]:
    """For each image its Detections, or why there are none: one bad image spoils no other.

    A missing package and a device without memory are raised: they concern all images.
    """
    try:
        detections = find(images)
        if len(detections) != len(images):
            raise ValueError(f"answered for {len(detections)} of {len(images)} images")
        return detections
    except (ImportError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if len(images) == 1:
            return [error]
    return [detect(find, images[i : i + 1])[0] for i in range(len(images))]

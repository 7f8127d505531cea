"""What finds objects for the reward `geneval`, by name.

A detector is called with images (B, H, W, 3) uint8 RGB and returns a list of Detections for each
of them. Its attributes, all optional:

    threshold, counting_threshold  which scores count; of counting prompts, and of all others
    floor    it does not report what it is less sure of
    classes  the names that it can find
    colors   the colours that it tells itself, () when none
    load     (), brings the weights; what it raises concerns all images
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..geneval_rules import Detection

Detector = Callable[..., Sequence[Sequence[Detection]]]

DETECTORS = {
    "tiny": f"{__name__}.tiny:TinyDetector",
    "mask2former": f"{__name__}.mask2former:Mask2FormerDetector",
}


def load_detector(name: str, args: Mapping[str, Any] | None = None) -> Detector:
    """Return the detector of that name in DETECTORS, or of "module:attribute", called with args.

    Raises ValueError for a name that is neither.
    """
    module, colon, attribute = DETECTORS.get(name, name).partition(":")
    if not colon:
        names = ", ".join(DETECTORS)
        raise ValueError(f"unknown detector {name!r}: use {names}, or 'module:attribute'")
    return getattr(importlib.import_module(module), attribute)(**(args or {}))

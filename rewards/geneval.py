"""GenEval as a reward: a detector finds the objects, the rules judge them."""

import importlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rewards import geneval_rules as rules
from rewards.geneval_rules import Detection
from rewards.images import to_uint8

Detector = Callable[[np.ndarray], Sequence[Sequence[Detection]]]  # (B, H, W, 3) uint8 RGB
DETECTORS = {"tiny": "rewards.tiny_detector:TinyDetector"}
MODES = ("partial", "strict", "official")
NO_TAG = -10.0  # what the published reward server answers for a prompt without a known tag


class GenEval:
    """Does the picture show what the prompt asks for? Six kinds of prompt (see `geneval_rules`).

    mode: "partial" (mean of the terms, what Flow-GRPO trains on), "strict" (0 or 1, all terms
    right) or "official" (0 or 1, the rule of the GenEval paper).
    detector: a name in DETECTORS or "module:attribute"; called without arguments, once, when it
    is first needed. It maps (B, H, W, 3) uint8 RGB to a list of Detections for
    each picture; its attributes `threshold` and `counting_threshold` say which scores count,
    `classes`, if it has it, what it can find.
    compat: "flow_grpo" reproduces the published reward's quirks (see `geneval_rules.terms`;
    a prompt that is none of the six kinds gets -10); None gives clean terms and NaN there.
    """

    required_metadata = ("tag", "include")
    differentiable = False
    scope = "sample"

    def __init__(self, mode: str = "partial", detector: str = "tiny", compat: str | None = None):
        if mode not in MODES:
            raise ValueError(f"GenEval mode is one of {', '.join(MODES)}, not {mode!r}")
        if compat not in (None, "flow_grpo"):
            raise ValueError(f"GenEval compat is 'flow_grpo' or null, not {compat!r}")
        self.mode = mode
        self.detector = detector
        self.compat = compat
        self.name = "geneval" if mode == "partial" else f"geneval_{mode}"
        self.bounds = (None if compat else 0.0, 1.0)
        self.version = f"geneval-1/{mode}/{detector}/{compat or 'clean'}"
        self._find: Detector | None = None

    def applies(self, prompt: str, metadata: dict) -> bool:
        """True for prompts of the six kinds."""
        return metadata.get("tag") in rules.TAGS and bool(metadata.get("include"))

    def check(self, prompt: str, metadata: dict) -> None:
        """Raises ValueError when the prompt asks for objects that the detector cannot know."""
        known = getattr(self._load(), "classes", None)
        for entry in metadata["include"]:
            if known is not None and entry["class"] not in known:
                raise ValueError(
                    f"the detector {self.detector!r} does not know {entry['class']!r}, only "
                    f"{', '.join(known)}: name another with args: {{detector: module:attribute}}"
                )

    def _load(self) -> Detector:
        if self._find is None:
            self._find = load_detector(self.detector)
        return self._find

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32; NaN where the prompt has no kind."""
        find = self._load()
        judged = [i for i, m in enumerate(metadata) if self.applies(prompts[i], m)]
        scores = [NO_TAG if self.compat else math.nan] * len(metadata)
        found = find(to_uint8(images[judged])) if judged else []
        for i, detections in zip(judged, found, strict=True):
            scores[i] = self.judge(detections, metadata[i])
        return torch.tensor(scores, dtype=torch.float32)

    def judge(self, found: Sequence[Detection], wanted: dict) -> float:
        """The score of one picture's detections for one prompt's metadata."""
        key = "counting_threshold" if wanted["tag"] == "counting" else "threshold"
        objects = rules.by_class(found, getattr(self._find, key, 0.0))
        if self.mode == "official":
            return rules.official(objects, wanted["include"], wanted.get("exclude", []))
        if self.mode == "strict":
            return rules.strict(objects, wanted["include"])
        return rules.partial(objects, wanted["include"], published=self.compat is not None)


def load_detector(name: str) -> Detector:
    """The detector of that name in DETECTORS, or of "module:attribute", called without arguments.

    Raises ValueError for a name that is neither.
    """
    target = DETECTORS.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        known = ", ".join(DETECTORS)
        raise ValueError(f"unknown detector {name!r}: use {known}, or 'module:attribute'")
    return getattr(importlib.import_module(module), attribute)()

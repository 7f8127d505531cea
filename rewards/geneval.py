"""GenEval as a reward: a detector finds the objects, the rules judge them."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import geneval_rules as rules
from .detectors import DETECTORS, Detector, load_detector
from .detectors.clip_colors import ClipColors
from .fixtures import blank, fixture, shapes
from .geneval_rules import Detection
from .images import to_uint8
from .networks.sharing import shared

MODES = ("partial", "strict", "official")
# Of detectors whose numbers have changed: scores under another version do not compare.
VERSIONS = {"mask2former": "mask2former-2", "tiny": "tiny-2"}


class GenEval:
    """Does the image show what the prompt asks for? Six kinds of prompt (see `geneval_rules`).

    Rewards of a process with the same detector share it, and it sees a batch of images once.

    Args:
        mode: "partial", the mean of the terms, what Flow-GRPO trains on; "strict", 0 or 1, all
            terms right; "official", 0 or 1, the rule of the GenEval paper.
        detector: a name in `detectors.DETECTORS` or "module:attribute", made with detector_args
            when it is first needed.
        colors: what names the colours of objects: "clip", the rule of the GenEval paper, made with
            colors_args; None leaves it to the detector.
    """

    required_metadata = ("tag", "include")
    differentiable = False

    def __init__(
        self,
        mode: str = "partial",
        detector: str = "tiny",
        *,
        detector_args: Mapping[str, Any] | None = None,
        colors: str | None = None,
        colors_args: Mapping[str, Any] | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"GenEval mode is one of {', '.join(MODES)}, not {mode!r}")
        if colors not in (None, "clip"):
            raise ValueError(f"colors is clip, or null for the detector's own, not {colors!r}")
        self.mode = mode
        self.detector, self.detector_args = detector, dict(detector_args or {})
        self.colors, self.colors_args = colors, dict(colors_args or {})
        self.name = "geneval" if mode == "partial" else f"geneval_{mode}"
        self.bounds = (0.0, 1.0)
        self.version = self._version()
        key = (detector, json.dumps(self.detector_args, sort_keys=True, default=repr))
        self._detectors = shared(("detector", *key), self)

    def _version(self) -> str:
        parts = [
            "geneval-3",
            self.mode,
            VERSIONS.get(self.detector, self.detector),
            self.colors or "own",
        ]
        said = {
            "detector": _telling(self.detector_args),
            "colors": _telling(self.colors_args),
        }
        said = {key: value for key, value in said.items() if value}
        return "/".join(parts + ([json.dumps(said, sort_keys=True, default=str)] if said else []))

    def applies(self, prompt: str, metadata: dict) -> bool:
        """Return whether a prompt is in GenEval's form: it has a tag, or lists objects."""
        return metadata.get("tag") in rules.TAGS or bool(metadata.get("include"))

    def check(self, prompt: str, metadata: dict) -> None:
        """Raise ValueError for a prompt that is not in GenEval's form, or asks for objects or
        colours that nothing here can find.
        """
        rules.check(metadata)
        classes = getattr(self._find, "classes", None)
        colors = getattr(self._name_colors or self._find, "colors", None)
        for entry in metadata["include"]:
            if classes is not None and entry["class"] not in classes:
                raise ValueError(
                    f"the detector {self.detector!r} does not know {entry['class']!r}, only "
                    f"{', '.join(classes)}: take args: {{detector: mask2former}} for COCO's 80 "
                    "classes"
                )
            for key in ("size", "place"):
                if rules.asks(entry, key) and key not in getattr(self._find, "tells", ()):
                    raise ValueError(
                        f"the detector {self.detector!r} tells no {key}, and include asks for "
                        f"{entry[key]!r}: keep such prompts to the tiny world's detector"
                    )
            key = entry.get("color")
            if colors is not None and key is not None and key not in colors:
                raise ValueError(
                    f"{self.colors or self.detector!r} does not know the colour "
                    f"{key!r}, only {', '.join(colors) or 'objects'}: add colors: clip to args"
                )

    @functools.cached_property
    def _find(self) -> Detector:
        return self._detectors.load(lambda: load_detector(self.detector, self.detector_args))

    @functools.cached_property
    def _name_colors(self) -> ClipColors | None:
        return None if self.colors is None else ClipColors(**self.colors_args)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        """Score images (B, 3, H, W) in [0, 1]: scores (B,) float32 and why some are NaN, by row."""
        scores = torch.full((len(metadata),), math.nan)
        reasons: dict[int, str] = {}
        for row, wanted in enumerate(metadata):
            try:
                rules.check(wanted)
            except ValueError as error:
                reasons[row] = f"the prompt is not in GenEval's form: {error}"
        rows = [row for row in range(len(metadata)) if row not in reasons]
        if not rows:
            return scores, reasons
        find = self._find
        for part in (find, self._name_colors):
            getattr(part, "load", lambda: None)()  # the weights
        arrays = to_uint8(images[rows])
        answers = self._detectors.recall("", arrays, lambda: find(arrays))
        for row, array, detections in zip(rows, arrays, answers, strict=True):
            try:
                scores[row] = self.judge(detections, metadata[row], array)
            except Exception as error:  # of what names colours; other images keep their scores
                reasons[row] = f"{type(error).__name__}: {error}"
        return scores, reasons

    def judge(
        self, detections: Sequence[Detection], wanted: dict, image: np.ndarray | None = None
    ) -> float:
        """Return the score of one image's detections for one prompt's metadata.

        image: (H, W, 3) uint8 RGB, for what names the colours of what was found.
        """
        key = "counting_threshold" if wanted["tag"] == "counting" else "threshold"
        objects = rules.by_class(detections, getattr(self._find, key, 0.0))
        if image is not None and self._name_colors is not None:
            self._color(objects, wanted["include"], image)
        if self.mode == "official":
            return rules.official(objects, wanted["include"], wanted.get("exclude") or [])
        if self.mode == "strict":
            return rules.strict(objects, wanted["include"])
        return rules.partial(objects, wanted["include"])

    def _color(self, objects: rules.Objects, include: Sequence[dict], image: np.ndarray) -> None:
        """Name the colours that the rules need, of as many objects as the prompt wants."""
        for entry in include:
            if not rules.asks(entry, "color") or self._name_colors is None:
                continue
            detections = objects.get(entry["class"], [])
            first = detections[: entry["count"]]
            names = self._name_colors(image, first) if first else ()
            detections[: entry["count"]] = [
                dataclasses.replace(d, color=c) for d, c in zip(first, names, strict=True)
            ]

    def fixtures(self) -> list[dict]:
        """Return images in their right order: of the tiny world, or a photograph; none for
        detectors of one's own.
        """
        if self.detector == "tiny":
            return tiny_world()
        if self.detector not in DETECTORS:
            return []
        # A second box on the one cat is no fault to stop a run for: asked for two, one to three
        # score above none.
        return cat_or_nothing(2 if self.mode == "partial" else 1)


# --- fixtures -------------------------------------------------------------------------------------


def tiny_world() -> list[dict]:
    """Return prompts of the tiny world in GenEval's form."""
    ball = {"class": "circle", "count": 1, "color": "red"}
    three = {"class": "star", "count": 3}
    return [
        fixture(
            "the right colour scores above the wrong one",
            shapes([("circle", "red")]), shapes([("circle", "blue")]),
            "a red circle", {"tag": "colors", "include": [ball]},
        ),
        fixture(
            "the right number scores above the wrong one",
            shapes([("star", "black")] * 3), shapes([("star", "black")] * 2),
            "three stars", {"tag": "counting", "include": [three]},
        ),
        fixture(
            "an object scores above an empty image",
            shapes([("circle", "red")]), blank(64), "a circle",
            {"tag": "single_object", "include": [{"class": "circle", "count": 1}]},
        ),
    ]  # fmt: skip


def cat_or_nothing(count: int = 1) -> list[dict]:
    """Return a photograph for detectors of photographs: Chelsea by Stefan van der Walt (CC0), which
    comes with scikit-image, and paper of its size, 300 by 451 pixels. count: of cats to ask for.
    """
    from skimage.data import chelsea

    cat = torch.from_numpy(chelsea()).permute(2, 0, 1).float().contiguous() / 255
    height, width = cat.shape[1:]
    paper = blank(max(height, width))[:, :height, :width].contiguous()
    wanted = {"tag": "single_object", "include": [{"class": "cat", "count": count}]}
    return [fixture("a cat scores above an empty image", cat, paper, "a photo of a cat", wanted)]


# --- helpers --------------------------------------------------------------------------------------


def _telling(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that change the numbers."""
    return {key: value for key, value in args.items() if key not in ("device", "batch")}

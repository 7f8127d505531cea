"""Objects in photographs, of COCO's 80 classes, with masks: Mask2Former (Cheng et al. 2022,
arXiv 2112.01527) as transformers has it.

GenEval uses the same architecture from another framework and another training run: its numbers and
these are alike, not equal, and the thresholds are worth checking against each other.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..geneval_rules import COCO, Detection
from ..networks.loading import DTYPES, check_dtype, device_of, fetching, imported
from ..networks.sharing import shared

DIVISOR = 32  # of the sides of what the network sees
MOST = 100  # objects of an image, as published
# GenEval's names for what would be ambiguous in a prompt, and names that checkpoints write in
# another way.
RENAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


class Mask2FormerDetector:
    """(B, H, W, 3) uint8 RGB -> for every image its objects as a list of Detections with masks.

    model: a name on the Hugging Face hub or a folder. threshold, counting_threshold: GenEval's
    (arXiv 2310.11513). floor: objects less sure are not reported. batch: images at a time.
    shortest, longest: images are resized until their shorter edge has so many pixels, or their
    longer one, as published; their proportions stay, and masks are decided at their own size.
    classes: the names that prompts may use, which must be the model's after RENAMES.
    """

    colors = ()

    def __init__(
        self,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        *,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        floor: float = 0.05,
        batch: int = 4,
        shortest: int = 800,
        longest: int = 1333,
        classes: Sequence[str] = COCO,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.model, self.device, self.dtype = model, device, check_dtype(dtype)
        self._shared = shared(("mask2former", model, device, dtype), self)
        self.threshold, self.counting_threshold, self.floor = threshold, counting_threshold, floor
        self.batch = batch
        self.size = {"shortest_edge": shortest, "longest_edge": longest}
        self.classes = tuple(classes)

    def load(self) -> None:
        """Load the weights. Raises FileNotFoundError when they are not there, ValueError when the
        model knows other classes.
        """
        labels = self.network.config.id2label
        names = tuple(RENAMES.get(labels[i], str(labels[i])) for i in range(len(labels)))
        if names != self.classes:
            raise ValueError(
                f"{self.model!r} knows the classes {', '.join(names)}: name these, in this "
                "order, as classes"
            )

    @functools.cached_property
    def network(self) -> Any:
        return self._shared.load(self._load_network)

    def _load_network(self) -> Any:
        """Raise ImportError or FileNotFoundError of one sentence for what is not there."""
        imported("scipy", "the detector Mask2Former")
        name = "transformers:Mask2FormerForUniversalSegmentation"
        kind = imported(name, "the detector Mask2Former")
        with fetching(self.model):
            network = kind.from_pretrained(self.model)
        return network.eval().requires_grad_(False).to(device_of(self.device), DTYPES[self.dtype])

    @functools.cached_property
    def _processor(self) -> Any:
        """Return the one that resizes with Pillow: the default depends on whether torchvision is
        installed, and their pixels differ. Before transformers 5 it had no suffix.
        """
        import transformers

        plain = "Mask2FormerImageProcessor"
        kind = getattr(transformers, plain + "Pil", None) or getattr(transformers, plain)
        with fetching(self.model):
            return kind.from_pretrained(self.model)

    def __call__(self, images: np.ndarray) -> list[list[Detection]]:
        self.load()
        starts = range(0, len(images), self.batch)
        return [detections for i in starts for detections in self._find(images[i : i + self.batch])]

    @torch.no_grad()
    def _find(self, images: np.ndarray) -> list[list[Detection]]:
        pixels = self._processor(
            list(images), return_tensors="pt", input_data_format="channels_last",
            size=self.size, size_divisor=0,
        )["pixel_values"].to(self.network.device, DTYPES[self.dtype])  # fmt: skip
        seen = (pixels.shape[2], pixels.shape[3])
        # As mmdet does: zeros at the right and below, which the masks then lose again.
        below, right = (-side % DIVISOR for side in seen)
        outputs = self.network(pixel_values=F.pad(pixels, (0, right, 0, below)))
        classes = outputs.class_queries_logits.float().softmax(-1)[..., :-1]
        padded = (seen[0] + below, seen[1] + right)
        return [
            self._detections(scores, masks.float(), padded, seen, images.shape[1:3])
            for scores, masks in zip(classes, outputs.masks_queries_logits, strict=True)
        ]

    def _detections(
        self,
        scores: Tensor,
        masks: Tensor,
        padded: tuple[int, int],
        seen: tuple[int, int],
        size: tuple[int, ...],
    ) -> list[Detection]:
        """Return the objects of one image: class probabilities times how sure their masks are.

        scores: (Q, C); masks: (Q, h, w) logits of the padded input, `seen` of which is the image;
        size: the image's own, at which masks are decided.
        """
        best, places = scores.flatten().topk(min(MOST, scores.numel()))
        places = places[best >= self.floor]  # a mask only lowers a score
        detections = []
        for place in places.tolist():
            query, label = divmod(place, scores.shape[1])
            mask = _enlarged(masks[query][None, None], padded, seen, size)
            inside = mask > 0
            sure = (mask.sigmoid() * inside).sum() / (inside.sum() + 1e-6)
            score = float(scores[query, label] * sure)
            if score >= self.floor and bool(inside.any()):
                mask = inside.cpu().numpy()
                name = self.classes[label]
                detections.append(Detection(box=_box(mask), score=score, name=name, mask=mask))
        return detections


def _enlarged(
    mask: Tensor, padded: tuple[int, int], seen: tuple[int, int], size: tuple[int, ...]
) -> Tensor:
    """Return a mask (1, 1, h, w) of the padded input at the image's own size, (H, W)."""
    whole = F.interpolate(mask, size=padded, mode="bilinear", align_corners=False)
    mask = whole[..., : seen[0], : seen[1]]
    return F.interpolate(mask, size=tuple(size), mode="bilinear", align_corners=False)[0, 0]


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the smallest box around a mask (H, W) that is not empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)

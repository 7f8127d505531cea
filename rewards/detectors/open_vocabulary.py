"""Objects of any name in photographs: OWLv2 (Minderer et al. 2023, arXiv 2306.09683).

It is not limited to COCO's 80 classes. It gives no masks, and no published GenEval number was made
with it: choose the thresholds on images of your own.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import cv2
import numpy as np
import torch
from torch import Tensor

from ..geneval_rules import Box, Detection
from .object_model import ObjectModel

MODEL = "google/owlv2-base-patch16-ensemble"


class Owlv2Detector:
    """(B, H, W, 3) uint8 RGB and class names for each -> a list of Detections for each image.

    Every box has the class that fits best.

    Args:
        model: a name on the Hugging Face hub or a folder.
        floor: objects with a lower score are not reported.
        overlap: of boxes of one class with a larger intersection over union only the best counts.
        batch: images at a time.
    """

    open_vocabulary = True
    colors = ()

    def __init__(
        self,
        *,
        model: str = MODEL,
        threshold: float = 0.2,
        counting_threshold: float | None = None,
        floor: float = 0.05,
        overlap: float = 0.5,
        batch: int = 4,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.threshold = threshold
        self.counting_threshold = threshold if counting_threshold is None else counting_threshold
        self.floor, self.overlap, self.batch = floor, overlap, batch
        self.model = ObjectModel(
            model, family="Owlv2", kind="Owlv2ForObjectDetection", device=device, dtype=dtype
        )

    def load(self) -> None:
        """Load the weights. Raises FileNotFoundError when they are not there."""
        _ = self.model.network, self.model.tokenizer

    def find(self, images: np.ndarray, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return boxes (B, Q, 4) xyxy in pixels and scores (B, Q, K) in [0, 1].

        The score is the sigmoid of a box's similarity to "a photo of a {class}".
        """
        model = self.model
        texts = [f"a photo of a {name}" for name in classes]
        length = model.network.config.text_config.max_position_embeddings
        tokens = model.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(model.network.device)
        outputs = model.network(
            input_ids=tokens["input_ids"].repeat(len(images), 1),
            attention_mask=tokens["attention_mask"].repeat(len(images), 1),
            pixel_values=model.pixels(images)["pixel_values"],
        )
        # The image was padded at the right and below: boxes are shares of a square's side.
        centre, extent = outputs.pred_boxes.float().unflatten(-1, (2, 2)).unbind(-2)
        side = max(images.shape[1:3])
        corners = torch.cat([centre - extent / 2, centre + extent / 2], -1) * side
        return corners, outputs.logits.float().sigmoid()

    @torch.no_grad()
    def __call__(
        self, images: np.ndarray, classes: Sequence[Sequence[str]]
    ) -> list[list[Detection]]:
        result = []
        for rows, names in _alike(classes, self.batch):
            boxes, scores = self.find(images[rows], names)
            pairs = zip(boxes.cpu().numpy(), scores.cpu().numpy(), strict=True)
            result += [self._detections(b, s, names, images.shape[1:3]) for b, s in pairs]
        return result

    def _detections(
        self, boxes: np.ndarray, scores: np.ndarray, names: Sequence[str], size: tuple[int, ...]
    ) -> list[Detection]:
        """Return boxes (Q, 4), scores (Q, K) of one image of size (height, width)."""
        limits = np.array([size[1], size[0]] * 2)
        boxes = boxes.clip(0, limits)
        kind, best = scores.argmax(1), scores.max(1)
        sized = boxes[:, 2:] - boxes[:, :2]
        keep = (best > self.floor) & (sized > 0).all(1)
        boxes, kind, best, sized = boxes[keep], kind[keep], best[keep], sized[keep]
        if not len(boxes):
            return []
        cornered = [tuple(map(float, row)) for row in np.concatenate([boxes[:, :2], sized], 1)]
        first = cv2.dnn.NMSBoxesBatched(
            cornered, best.tolist(), kind.tolist(), self.floor, self.overlap
        )
        return [
            Detection(box=_box(boxes[i]), score=float(best[i]), name=names[int(kind[i])])
            for i in first
        ]


def _box(row: np.ndarray) -> Box:
    left, top, right, bottom = map(float, row)
    return left, top, right, bottom


def _alike(classes: Sequence[Sequence[str]], batch: int) -> Iterator[tuple[slice, Sequence[str]]]:
    """Yield rows of neighbours with the same classes, as the images of a group, and the classes."""
    start = 0
    for names, same in groupby(map(tuple, classes)):
        end = start + len(list(same))
        for first in range(start, end, batch):
            yield slice(first, min(first + batch, end)), names
        start = end

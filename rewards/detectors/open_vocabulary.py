"""Objects of any name in photographs: OWLv2 (Minderer et al. 2023, arXiv 2306.09683) and
Grounding DINO (Liu et al. 2023, arXiv 2303.05499) as transformers has them.

They lift the limit to COCO's 80 classes. Neither gives masks, and no published GenEval number was
made with them: choose the thresholds on images of your own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import cv2
import numpy as np
import torch
from torch import Tensor

from ..geneval_rules import Box, Detection
from .object_model import ObjectModel

# (model, images, classes) -> boxes (B, Q, 4) xyxy in pixels, scores (B, Q, K) in [0, 1]
Find = Callable[[ObjectModel, np.ndarray, Sequence[str]], tuple[Tensor, Tensor]]


def find_owlv2(model: ObjectModel, images: np.ndarray, classes: Sequence[str]):
    """The score is the sigmoid of a box's similarity to "a photo of a {class}"."""
    texts = [f"a photo of a {name}" for name in classes]
    length = model.network.config.text_config.max_position_embeddings
    told = model.tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).to(model.network.device)
    outputs = model.network(
        input_ids=told["input_ids"].repeat(len(images), 1),
        attention_mask=told["attention_mask"].repeat(len(images), 1),
        pixel_values=model.pixels(images)["pixel_values"],
    )
    # The image was padded at the right and below: boxes are shares of a square's side.
    side = max(images.shape[1:3])
    return _corners(outputs.pred_boxes, (side, side)), outputs.logits.float().sigmoid()


def find_grounding_dino(model: ObjectModel, images: np.ndarray, classes: Sequence[str]):
    """All classes are one text, "cat. computer mouse."; the score of a class is the mean sigmoid
    over its tokens, as in the authors' evaluation on COCO."""
    stop = model.tokenizer.convert_tokens_to_ids(".")
    ids, spans = [model.tokenizer.cls_token_id], []
    for name in classes:
        words = model.tokenizer(name.lower().replace(".", " "), add_special_tokens=False)
        spans.append(slice(len(ids), len(ids) + len(words["input_ids"])))
        ids += [*words["input_ids"], stop]
    text = torch.tensor([[*ids, model.tokenizer.sep_token_id]], device=model.network.device)
    text = text.repeat(len(images), 1)
    outputs = model.network(
        input_ids=text, attention_mask=torch.ones_like(text), **model.pixels(images)
    )
    by_token = outputs.logits.float().sigmoid()
    scores = torch.stack([by_token[..., span].mean(-1) for span in spans], -1)
    return _corners(outputs.pred_boxes, images.shape[1:3]), scores


def _corners(boxes: Tensor, size: tuple[int, ...]) -> Tensor:
    """Centres and sizes as shares of size (height, width) -> corners xyxy in pixels."""
    middle, extent = boxes.float().unflatten(-1, (2, 2)).unbind(-2)
    scale = torch.tensor([size[1], size[0]], device=boxes.device)
    return torch.cat([(middle - extent / 2) * scale, (middle + extent / 2) * scale], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One architecture, with the defaults that suit it."""

    model: str
    family: str
    network: str
    find: Find
    threshold: float
    overlap: float


KINDS = {
    "owlv2": _Kind(
        model="google/owlv2-base-patch16-ensemble",
        family="Owlv2",
        network="Owlv2ForObjectDetection",
        find=find_owlv2,
        threshold=0.2,
        overlap=0.5,
    ),
    "grounding_dino": _Kind(
        model="IDEA-Research/grounding-dino-base",
        family="GroundingDino",
        network="GroundingDinoForObjectDetection",
        find=find_grounding_dino,
        threshold=0.35,
        overlap=0.8,
    ),
}


class OpenDetector:
    """(B, H, W, 3) uint8 RGB and class names for each -> for every image a list of Detections.

    kind: "owlv2" or "grounding_dino"; model: a name on the Hugging Face hub or a folder. Every box
    has the class that fits best; of boxes of one class that overlap by more than `overlap`
    (intersection over union) the surest counts. floor: objects less sure are not reported. batch:
    images at a time.
    """

    open_vocabulary = True
    colors = ()

    def __init__(
        self,
        kind: str,
        *,
        model: str | None = None,
        threshold: float | None = None,
        counting_threshold: float | None = None,
        floor: float = 0.05,
        overlap: float | None = None,
        batch: int = 4,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        if kind not in KINDS:
            raise ValueError(f"the kind is one of {', '.join(KINDS)}, not {kind!r}")
        used = KINDS[kind]
        self.find = used.find
        self.threshold = used.threshold if threshold is None else threshold
        self.counting_threshold = (
            self.threshold if counting_threshold is None else counting_threshold
        )
        self.overlap = used.overlap if overlap is None else overlap
        self.floor, self.batch = floor, batch
        self.model = ObjectModel(
            model or used.model, family=used.family, kind=used.network, device=device, dtype=dtype
        )

    def load(self) -> None:
        """Brings the weights. Raises FileNotFoundError when they are not there."""
        _ = self.model.network, self.model.tokenizer

    @torch.no_grad()
    def __call__(
        self, images: np.ndarray, classes: Sequence[Sequence[str]]
    ) -> list[list[Detection]]:
        result = []
        for rows, names in _alike(classes, self.batch):
            boxes, scores = self.find(self.model, images[rows], names)
            pairs = zip(boxes.cpu().numpy(), scores.cpu().numpy(), strict=True)
            result += [self._detections(b, s, names, images.shape[1:3]) for b, s in pairs]
        return result

    def _detections(
        self, boxes: np.ndarray, scores: np.ndarray, names: Sequence[str], size: tuple[int, ...]
    ) -> list[Detection]:
        """boxes (Q, 4), scores (Q, K) of one image of size (height, width)."""
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


Owlv2Detector = functools.partial(OpenDetector, "owlv2")
GroundingDinoDetector = functools.partial(OpenDetector, "grounding_dino")


def _box(row: np.ndarray) -> Box:
    left, top, right, bottom = map(float, row)
    return left, top, right, bottom


def _alike(classes: Sequence[Sequence[str]], batch: int) -> Iterator[tuple[slice, Sequence[str]]]:
    """Neighbours that ask for the same, as the images of a group do: rows and their classes."""
    start = 0
    for names, same in groupby(map(tuple, classes)):
        end = start + len(list(same))
        for first in range(start, end, batch):
            yield slice(first, min(first + batch, end)), names
        start = end

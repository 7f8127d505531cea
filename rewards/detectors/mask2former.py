"""Objects in photographs, of COCO's 80 classes, with masks: Mask2Former (Cheng et al. 2022,
arXiv 2112.01527) as transformers has it.

GenEval uses the same architecture from another framework and another training run: its numbers and
these are alike, not equal, and the thresholds are worth checking against each other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..geneval_rules import Detection
from .object_model import ObjectModel

COCO = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog",
    "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella",
    "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite",
    "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange",
    "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant",
    "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
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
        classes: Sequence[str] = COCO,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.model = ObjectModel(
            model,
            family="Mask2Former",
            kind="Mask2FormerForUniversalSegmentation",
            device=device,
            dtype=dtype,
        )
        self.threshold, self.counting_threshold, self.floor = threshold, counting_threshold, floor
        self.batch = batch
        self.classes = tuple(classes)

    def load(self) -> None:
        """Brings the weights. Raises FileNotFoundError when they are not there, ValueError when
        the model knows other classes."""
        labels = self.model.network.config.id2label
        names = tuple(RENAMES.get(labels[i], str(labels[i])) for i in range(len(labels)))
        if names != self.classes:
            raise ValueError(
                f"{self.model.model!r} knows the classes {', '.join(names)}: name these, in this "
                "order, as classes"
            )

    def __call__(self, images: np.ndarray) -> list[list[Detection]]:
        self.load()
        starts = range(0, len(images), self.batch)
        return [found for i in starts for found in self._find(images[i : i + self.batch])]

    @torch.no_grad()
    def _find(self, images: np.ndarray) -> list[list[Detection]]:
        outputs = self.model.network(pixel_values=self.model.pixels(images)["pixel_values"])
        outputs.class_queries_logits = outputs.class_queries_logits.float()
        outputs.masks_queries_logits = outputs.masks_queries_logits.float()
        found = self.model.processor.post_process_instance_segmentation(
            outputs,
            threshold=self.floor,
            target_sizes=[images.shape[1:3]] * len(images),
            return_binary_maps=True,
        )
        return [self._detections(one["segmentation"], one["segments_info"]) for one in found]

    def _detections(self, masks: torch.Tensor, infos: Sequence[dict]) -> list[Detection]:
        """masks (n, H, W) and what they are; without objects the map is empty and says nothing."""
        maps = masks.bool().cpu().numpy() if infos else ()
        return [
            Detection(
                box=_box(mask),
                score=float(info["score"]),
                name=self.classes[info["label_id"]],
                mask=mask,
            )
            for mask, info in zip(maps, infos, strict=True)
        ]


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    """The smallest box around a mask (H, W) that is not empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)

"""GenEval's rules over detected objects: pure Python, no image and no model in sight.

Ghosh et al. 2023 (arXiv 2310.11513) define the six kinds of prompt and the official verdict;
Flow-GRPO (arXiv 2505.05470) trains on a partial score and logs a strict one. A prompt lists
what it wants in `include`: {"class", "count", optional "color", optional "position": [relation,
index of an earlier entry]}, and for counting what it forbids in `exclude`: {"class", "count"}.

An entry of the tiny world may also ask for a "size" and a "place" (a quarter of the image). They
count in the partial and the strict score, by a detector that tells them; the official verdict does
not know them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

Tag = Literal["single_object", "two_object", "counting", "colors", "position", "color_attr"]
Relation = Literal["left of", "right of", "above", "below"]
TAGS: tuple[Tag, ...] = get_args(Tag)
MAX_PER_CLASS = 16  # boxes, the most confident first
NEEDS = {"colors": "color", "color_attr": "color", "position": "position"}  # of some entry
COLORS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
# The 80 classes of COCO (Lin et al. 2014, arXiv 1405.0312), three of them as GenEval renames them:
# computer mouse, tv remote, computer keyboard.
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
OVERLAP = 0.1  # share of both sizes that an offset must exceed
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One found object: box (left, top, right, bottom) in pixels, y down; confidence in [0, 1].

    `color` is None when the detector does not tell colours or is not sure; `mask`, where there is
    one, says which pixels are the object's: (H, W) bool, as large as the image.
    """

    box: Box
    score: float
    name: str
    color: str | None = None
    size: str | None = None  # None when the detector does not tell sizes, as with places
    place: str | None = None
    mask: Any = field(default=None, compare=False, repr=False)


Objects = dict[str, list[Detection]]


class WantedObject(BaseModel):
    """One kind of object that is asked for or forbidden; null stands for nothing."""

    name: str = Field(alias="class")
    count: Annotated[int, Field(strict=True, ge=1)]
    color: str | None = None
    size: str | None = None
    place: str | None = None
    position: tuple[Relation, Annotated[int, Field(strict=True, ge=0)]] | None = None


class WantedImage(BaseModel):
    """A prompt's metadata in GenEval's form."""

    tag: Tag
    include: Annotated[list[WantedObject], Field(min_length=1)]
    exclude: list[WantedObject] | None = None


def check(metadata: dict) -> None:
    """Raise ValueError unless metadata are in GenEval's form: what is asked for can come true."""
    try:
        wanted = WantedImage.model_validate(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place} is {first['input']!r:.80}: {first['msg']}") from error
    for i, entry in enumerate(wanted.include):
        if entry.position is not None and entry.position[1] >= i:
            raise ValueError(f"include.{i}.position is {entry.position}: expected an earlier entry")
    need = NEEDS.get(wanted.tag)
    if need and all(getattr(entry, need) is None for entry in wanted.include):
        raise ValueError(f"the tag is {wanted.tag!r}, and include asks for no {need}")


def asks(entry: dict, key: str) -> bool:
    """Return whether an entry of include has a "color" or "position"; null is none."""
    return entry.get(key) is not None


def by_class(detections: Iterable[Detection], threshold: float) -> Objects:
    """Return detections above the threshold, by class, most confident first, at most 16 of each."""
    objects: Objects = {}
    for item in sorted(detections, key=lambda d: -d.score):
        of_class = objects.setdefault(item.name, [])
        if item.score > threshold and len(of_class) < MAX_PER_CLASS:
            of_class.append(item)
    return objects


def relations(a: Box, b: Box) -> set[str]:
    """Return how box a lies to box b: a subset of 'left of', 'right of', 'above', 'below'.

    Offsets between the centres shrink by a tenth of both sizes, so boxes that nearly coincide
    have no relation.
    """
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    sizes = [a[i + 2] - a[i] + b[i + 2] - b[i] for i in (0, 1)]
    shrunk = [max(abs(o) - OVERLAP * s, 0.0) for o, s in zip(offset, sizes, strict=True)]
    if max(shrunk) < 1e-3:
        return set()
    x, y = (math.copysign(s, o) / math.hypot(*offset) for s, o in zip(shrunk, offset, strict=True))
    tests = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in tests.items() if holds}


def _related(detections: list[Detection], targets: list[Detection], relation: str) -> bool:
    return all(relation in relations(a.box, b.box) for a in detections for b in targets)


def _having(detections: Sequence[Detection], entry: dict, key: str) -> int:
    """Return how many have the entry's "color", "size" or "place"."""
    return sum(getattr(d, key) == entry[key] for d in detections)


def official(objects: Objects, include: Sequence[dict], exclude: Sequence[dict]) -> float:
    """Return the published verdict, 0 or 1: enough of each among the most confident objects."""
    matched: list[list[Detection] | None] = []
    for entry in include:
        count = entry["count"]
        detections = objects.get(entry["class"], [])[:count]
        right = len(detections) == count
        if asks(entry, "color"):
            right = right and _having(detections, entry, "color") == count
        if right and asks(entry, "position"):
            relation, index = entry["position"]
            targets = matched[index]
            right = targets is not None and _related(detections, targets, relation)
        matched.append(detections if right else None)
    few = all(len(objects.get(entry["class"], [])) < entry["count"] for entry in exclude)
    return float(few and None not in matched)


def terms(objects: Objects, include: Sequence[dict]) -> list[float]:
    """Return Flow-GRPO's partial terms, each in [0, 1].

    One for each count, colour, size, place and relation. Two quirks of the code behind the paper
    are left out: its count terms fall below 0 when far too many objects are detected, and a failed
    relation is followed by a 1.
    """
    result: list[float] = []
    matched: list[list[Detection] | None] = []
    for entry in include:
        detections, count = objects.get(entry["class"], []), entry["count"]
        right = len(detections) == count
        entry_terms = [max(0.0, 1 - abs(len(detections) - count) / count)]
        for key in ("color", "size", "place"):
            if asks(entry, key):
                entry_terms.append(_having(detections, entry, key) / count if right else 0.0)
        good = entry_terms == [1.0] * len(entry_terms)
        if asks(entry, "position"):
            relation, index = entry["position"]
            target = matched[index] if good else None
            good = target is not None and _related(detections, target, relation)
            entry_terms.append(float(good))
        matched.append(detections if good else None)
        result += entry_terms
    return result


def strict(objects: Objects, include: Sequence[dict]) -> float:
    """Return 1 where every count, colour, size, place and relation is right, else 0."""
    return float(all(t == 1.0 for t in terms(objects, include)))


def partial(objects: Objects, include: Sequence[dict]) -> float:
    """Return the mean of the partial terms, in [0, 1]."""
    values = terms(objects, include)
    return sum(values) / len(values)

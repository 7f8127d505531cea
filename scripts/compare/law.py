"""Whether images still vary as the drawing program's own law says.

What a request leaves open, which quarters its objects take, is drawn evenly from its layouts (see
`scripts/pretrain_tiny/draw.py`). A policy that always draws one of them scores as well, and has
lost the others. Two figures tell, both of right images alone: how often two images of one request
have the same layout, without bias, beside what the law gives; and the entropy of layouts pooled
over requests with as many of them, whose distance from the law's is the divergence from it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flowrl_rewards.tiny_judge import QUARTERS, TinyJudge, meets
from torch import Tensor

from scripts.pretrain_tiny.draw import layouts

LAYOUT, FREEDOM = "tiny_layout", "tiny_freedom"  # measures of an image
Seen = tuple[str | None, ...]  # the shape in each quarter; shapes differ within a request


def visible_layouts(include: Sequence[dict[str, Any]]) -> list[Seen]:
    """List the layouts of a request that can be told apart, all equally likely.

    Their order is the same for all wordings.
    """
    shapes = [entry["class"] for entry in include for _ in range(entry["count"])]
    found = set()
    for chosen in layouts(list(include)):
        shown = dict(zip(chosen, shapes, strict=True))
        found.add(tuple(shown.get(quarter) for quarter in QUARTERS))
    return sorted(found, key=str)


class Layout:
    """Say which of its layouts an image has: 0, 1, ...; NaN where it is wrong or has no choice."""

    name, version = LAYOUT, "layout-1"

    def __init__(self) -> None:
        self.judge = TinyJudge()

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        read = self.judge.read(images)
        return torch.tensor(
            [
                _place(quarters, signs, wanted)
                for (quarters, signs), wanted in zip(read, metadata, strict=True)
            ]
        )


def _place(quarters: Sequence[Any], signs: Sequence[Any], wanted: dict[str, Any]) -> float:
    include = wanted.get("include")
    if not include or not meets(quarters, signs, wanted):
        return math.nan
    seen = tuple(found[0] if found else None for found in quarters)
    possible = visible_layouts(include)
    return float(possible.index(seen)) if len(possible) > 1 else math.nan


class Freedom:
    """Say how many layouts a request has; NaN for words."""

    name, version = FREEDOM, "freedom-1"

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        return torch.tensor(
            [
                float(len(visible_layouts(m["include"]))) if "include" in m else math.nan
                for m in metadata
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variety:
    """How the layouts of a run's right images vary."""

    images: int  # right, with a choice
    collisions: float  # share of pairs of one request with the same layout; NaN without pairs
    law: float  # the same under the law
    entropy: float  # nats, pooled over requests with as many layouts, the mean over images
    divergence: float  # nats from the law, likewise


def variety(requests: Sequence[int], layout: Sequence[float], freedom: Sequence[float]) -> Variety:
    """Measure one run's images; a NaN layout is left out.

    The entropy of a sample is too low by about (layouts - 1) / (2 images) (Miller 1955): that is
    added, so that images drawn by the law diverge by 0 in the mean.
    """
    kept = [
        (request, int(where), int(count))
        for request, where, count in zip(requests, layout, freedom, strict=True)
        if not math.isnan(where)
    ]
    by_request: dict[int, list[int]] = defaultdict(list)
    by_freedom: dict[int, list[int]] = defaultdict(list)
    counts = {}
    for request, where, count in kept:
        by_request[request].append(where)
        by_freedom[count].append(where)
        counts[request] = count
    pairs = {r: len(own) * (len(own) - 1) / 2 for r, own in by_request.items()}
    same = sum(n * (n - 1) / 2 for own in by_request.values() for n in Counter(own).values())
    whole = sum(pairs.values())
    entropy = {count: _entropy(own, count) for count, own in by_freedom.items()}
    share = {count: len(own) / len(kept) for count, own in by_freedom.items()}
    return Variety(
        images=len(kept),
        collisions=same / whole if whole else math.nan,
        law=sum(p / counts[r] for r, p in pairs.items()) / whole if whole else math.nan,
        entropy=sum(share[c] * h for c, h in entropy.items()),
        divergence=sum(share[c] * (math.log(c) - h) for c, h in entropy.items()),
    )


def _entropy(drawn: Sequence[int], layouts: int) -> float:
    shares = [n / len(drawn) for n in Counter(drawn).values()]
    return -sum(p * math.log(p) for p in shares) + (layouts - 1) / (2 * len(drawn))

"""Prompts in GenEval's form (Ghosh et al. 2023, arXiv 2310.11513), in our own wordings."""

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import combinations, permutations
from math import prod
from typing import Any

from flowrl.prompts.generate.templates import (
    COCO,
    COLORS,
    Sets,
    TemplateKind,
    article,
    plural,
    sample_sets,
)
from flowrl.prompts.overlap import request_of

# In this order everywhere. The default ratio is what Flow-GRPO (arXiv 2505.05470) trains on.
KINDS = ("position", "counting", "color_attr", "colors", "two_object", "single_object")
RATIO = (7, 5, 3, 1, 1, 0)
TEST_RATIO = (1, 1, 1, 1, 1, 1)
PREFIXES = (
    "a photo of ", "a picture of ", "an image of ", "a snapshot of ", "a photograph that shows ",
    "a plain picture with ", "a scene with ", "",
)  # fmt: skip
AXES = (("left of", "right of"), ("above", "below"))
NUMBERS = {2: "two", 3: "three", 4: "four"}
COLORLESS = ("person",)  # is given no colour


def geneval_sets(
    count: int,
    held_out: int,
    seed: int = 0,
    *,
    ratio: Sequence[int] = RATIO,
    excluded: Collection[Hashable] = (),
) -> Sets:
    """Return `count` and `held_out` prompts of the six kinds as rows in GenEval's form.

    No request is in both sets in any wording: "a cat left of a dog" and "a dog right of a cat" are
    the same. A kind with fewer requests than prompts repeats them in other words, then texts.

    Args:
        ratio: parts of the KINDS in training; the test has all kinds alike.
        excluded: requests (`overlap.request_of`) that neither set may have, such as those of a
            published test.

    Raises:
        UserError: a kind has no request for a set.
    """
    kinds = geneval_kinds(COCO)
    return sample_sets(
        kinds, count, held_out, seed, ratio=ratio, test_ratio=TEST_RATIO, excluded=excluded
    )


def geneval_kinds(classes: Sequence[str]) -> list[TemplateKind]:
    """Return the KINDS of prompts about these classes."""
    colorful = [name for name in classes if name not in COLORLESS]
    pairs, colorful_pairs = (list(combinations(names, 2)) for names in (classes, colorful))
    return [
        _kind("position", 2, _position, list(permutations(classes, 2)), AXES),
        _kind("counting", 1, _counting, list(classes), list(NUMBERS.items())),
        _kind("color_attr", 2, _color_attr, colorful_pairs, list(permutations(COLORS, 2))),
        _kind("colors", 1, _colors, colorful, COLORS),
        _kind("two_object", 2, _two_object, pairs),
        _kind("single_object", 1, _single_object, list(classes)),
    ]


def _kind(tag: str, sides: int, say: Callable[..., dict], *parts: Sequence[Any]) -> TemplateKind:
    """Combine all parts; sides: ways to word each combination, besides the prefixes."""

    def make(index: int, wording: int) -> dict:
        chosen = []
        for part in parts:
            index, place = divmod(index, len(part))
            chosen.append(part[place])
        side, prefix = divmod(wording, len(PREFIXES))
        row = say(side, *chosen)
        return {"tag": tag, "prompt": PREFIXES[prefix] + row.pop("text"), **row}

    return TemplateKind(
        name=tag,
        combinations=prod(map(len, parts)),
        wordings=sides * len(PREFIXES),
        make=make,
        key=lambda index: request_of(make(index, 0)),
    )


def _single_object(side: int, name: str) -> dict:
    return {"text": article(name), "include": [one(name)]}


def _two_object(side: int, pair: tuple[str, str]) -> dict:
    a, b = pair[::-1] if side else pair
    return {"text": f"{article(a)} and {article(b)}", "include": [one(a), one(b)]}


def _counting(side: int, name: str, number: tuple[int, str]) -> dict:
    count, word = number
    return {
        "text": f"{word} {plural(name)}",
        "include": [{"class": name, "count": count}],
        "exclude": [{"class": name, "count": count + 1}],
    }


def _colors(side: int, name: str, color: str) -> dict:
    return {"text": article(f"{color} {name}"), "include": [one(name, color)]}


def _position(side: int, pair: tuple[str, str], axis: tuple[str, str]) -> dict:
    """Say that pair[0] is on the first side of pair[1], or pair[1] on the other side of pair[0]."""
    (a, b), relation = (pair[::-1], axis[1]) if side else (pair, axis[0])
    text = f"{article(a)} {relation} {article(b)}"
    return {"text": text, "include": [one(b), one(a, position=[relation, 0])]}


def _color_attr(side: int, pair: tuple[str, str], colors: tuple[str, str]) -> dict:
    (a, b), (c, d) = (pair[::-1], colors[::-1]) if side else (pair, colors)
    text = f"{article(f'{c} {a}')} and {article(f'{d} {b}')}"
    return {"text": text, "include": [one(a, c), one(b, d)]}


def one(name: str, color: str | None = None, position: list | None = None) -> dict:
    """Return GenEval's `include` entry that asks for exactly one object."""
    entry: dict = {"class": name, "count": 1}
    if color:
        entry["color"] = color
    if position:
        entry["position"] = position
    return entry

"""A world of the arena: which defects were planted where, and who may see which request.

A world is a function of its seed. Its requests are those of the tiny world; for each kind of
request the seed draws the defects, how often each family of requests is drawn right, the families
that are withheld from alignment, and the split of the others' requests.
"""

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.tiny.world import (
    COLORS,
    MIRRORED,
    SHAPES,
    TAGS,
    Prompt,
    Request,
    family,
    prompts_of,
    requests,
)
from scripts.arena.flaws import FLAWS
from scripts.pretrain_tiny.defects import LETTERS
from scripts.pretrain_tiny.draw import INK, QUARTERS, draw
from scripts.pretrain_tiny.images import choose

SPLITS = ("train", "validation", "new requests", "new families")
WITHHELD = 0.25  # share of the families that alignment sees nothing of
SHARES = {"new requests": 0.25, "validation": 0.15}  # of the requests of a trained family
# How often the images that pretraining saw are right, by family; dealt so that each kind has about
# as many of each. With 0 the right image is absent: there is nothing to reinforce.
TIERS = (0.5, 0.1, 0.9, 0.5, 0.98, 0.1, 0.5, 0.9, 0.0)
CONDITIONED = 1 / 3  # share of the defects after a kind's first that have a condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One way in which images of a kind of request are wrong."""

    name: str  # of CHANGES, or of FLAWS
    condition: str = ""  # a value that the request must have; "" is none


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the seed drew."""

    seed: int
    defects: dict[str, tuple[Defect, ...]]  # by kind of request
    tiers: dict[tuple[str, int], float]  # (kind, family) -> share of right images
    withheld: frozenset[tuple[str, int]]  # families
    split: dict[Request, str]  # the requests that have one: those of SPLITS

    def sample(self, rng: random.Random) -> tuple[str, np.ndarray]:
        """Draw a prompt of all splits, and an image that pretraining sees for it."""
        request, prompt = choose(rng)
        return prompt["prompt"], self.image(prompt | self._place(request), rng)

    def image(self, prompt: Prompt, rng: random.Random) -> np.ndarray:
        """Draw an image that pretraining sees for a prompt of `prompts`: (64, 64, 3) uint8."""
        if rng.random() < prompt["right"]:
            return draw(prompt, rng)
        kind = self.defects[prompt["tag"]]
        defect = rng.choice(kind)
        if defect.condition and defect.condition not in values(prompt):
            defect = kind[0]
        if defect.name in FLAWS:
            return FLAWS[defect.name](draw(prompt, rng), rng)
        return draw(altered(prompt, defect.name, rng), rng)

    def prompts(self, split: str | None = None) -> list[Prompt]:
        """List the prompts of a split, or all, in an order drawn by the seed.

        Each has beside GenEval's keys `family`, `right` (how often pretraining drew it right) and
        `split`. The first ones are of different requests.
        """
        members = [r for tag in TAGS for r in requests(tag)]
        if split is not None:
            members = [r for r in members if self.split.get(r) == split]
        order = random.Random(f"arena {self.seed}, {split}")
        order.shuffle(members)
        wordings = [[p | self._place(r) for p in prompts_of(r)] for r in members]
        for texts in wordings:
            order.shuffle(texts)
        turns = max(map(len, wordings), default=0)
        return [texts[turn] for turn in range(turns) for texts in wordings if turn < len(texts)]

    def _place(self, request: Request) -> Prompt:
        key = (request.tag, family(request)[0])
        right = self.tiers[key]
        return {
            "tier": f"{right:g}",
            "right": right,
            "family": f"{key[0]} {key[1]}",
            "split": self.split.get(request, ""),
        }


@functools.cache
def world(seed: int) -> World:
    """Return the world of a seed."""
    rng = random.Random(f"arena {seed}")
    defects = {tag: _defects(tag, rng) for tag in TAGS}
    tiers: dict[tuple[str, int], float] = {}
    withheld: set[tuple[str, int]] = set()
    for tag in TAGS:
        families = sorted({family(r)[0] for r in requests(tag)})
        dealt = [right for i, right in zip(families, TIERS * len(families), strict=False)]
        rng.shuffle(dealt)
        tiers |= {(tag, f): right for f, right in zip(families, dealt, strict=True)}
        count = max(1, round(WITHHELD * len(families)))
        withheld |= {(tag, f) for f in rng.sample(families, count)}
    split = _split(frozenset(withheld), rng)
    return World(seed=seed, defects=defects, tiers=tiers, withheld=frozenset(withheld), split=split)


def canonical(request: Request) -> tuple:
    """Return what equal images satisfy: what a request leaves unnamed is the drawing's default."""
    things = [(t.shape, t.color or INK, t.size, t.place) for t in request.things]
    if not request.relation:
        things.sort()
    return (*things, request.count, request.relation, request.word)


def _split(withheld: frozenset[tuple[str, int]], rng: random.Random) -> dict[Request, str]:
    """Return the split of each request; none for one that a test has in another kind."""
    split: dict[Request, str] = {}
    for tag in TAGS:
        by_family: dict[int, list[Request]] = {}
        for request in requests(tag):
            by_family.setdefault(family(request)[0], []).append(request)
        for number, members in sorted(by_family.items()):
            if (tag, number) in withheld:
                split |= dict.fromkeys(members, "new families")
                continue
            rng.shuffle(members)
            start = 0
            for name, share in SHARES.items():
                stop = start + round(share * len(members))
                split |= dict.fromkeys(members[start:stop], name)
                start = stop
            split |= dict.fromkeys(members[start:], "train")
    # "Two rings" and "two black rings" are one request: the split that is furthest from training
    # has it, and the others do without.
    taken: dict[tuple, str] = {}
    for name in reversed(SPLITS):
        for request in [r for r, part in split.items() if part == name]:
            if taken.setdefault(canonical(request), name) != name:
                del split[request]
    return split


# --- defects -------------------------------------------------------------------------------------


def values(prompt: Prompt) -> set[str]:
    """Return the values that a prompt names: shapes, colours, sizes, quarters."""
    names = ("class", "color", "size", "place")
    return {e[name] for e in prompt.get("include", ()) for name in names if name in e}


def altered(prompt: Prompt, name: str, rng: random.Random) -> Prompt:
    """Return the prompt of a wrong image: a copy whose demands differ in one way."""
    wrong = copy.deepcopy(prompt)
    CHANGES[name](wrong, rng)
    return wrong


def _next(value: str, all_values: Sequence[str], taken: set[str]) -> str:
    """Return what follows `value` in the circle of all values and is not taken."""
    at = all_values.index(value)
    turn = (*all_values[at + 1 :], *all_values[:at])
    return next(v for v in turn if v not in taken)


def _shape(wrong: Prompt, rng: random.Random) -> None:
    entry = rng.choice(wrong["include"])
    entry["class"] = _next(entry["class"], SHAPES, {e["class"] for e in wrong["include"]})


def _color(wrong: Prompt, rng: random.Random) -> None:
    entry = rng.choice([e for e in wrong["include"] if "color" in e] or wrong["include"])
    entry["color"] = _next(entry.get("color", INK), COLORS, values(wrong))


def _size(wrong: Prompt, rng: random.Random) -> None:
    entry = rng.choice([e for e in wrong["include"] if "size" in e] or wrong["include"])
    if entry.pop("size", None) is None:
        entry["size"] = "small"


def _more(wrong: Prompt, rng: random.Random) -> None:
    entry = rng.choice(wrong["include"])
    if sum(e["count"] for e in wrong["include"]) == len(QUARTERS):
        entry["count"] -= 1
    else:  # elsewhere than where the first must be
        wrong["include"].append({**entry, "count": 1})
        wrong["include"][-1].pop("place", None)


def _fewer(wrong: Prompt, rng: random.Random) -> None:
    entry = wrong["include"][0]
    entry["count"] += -1 if entry["count"] > 1 else 1


def _mirrored(wrong: Prompt, rng: random.Random) -> None:
    placed = wrong["include"][1]
    placed["position"][0] = MIRRORED[placed["position"][0]]


def _missing(wrong: Prompt, rng: random.Random) -> None:
    del wrong["include"][rng.randrange(len(wrong["include"]))]
    wrong["include"][0].pop("position", None)


def _swapped(wrong: Prompt, rng: random.Random) -> None:
    a, b = wrong["include"]
    a["color"], b["color"] = b["color"], a["color"]


def _spilled(wrong: Prompt, rng: random.Random) -> None:
    first = rng.randrange(2)
    wrong["include"][1 - first]["color"] = wrong["include"][first]["color"]


def _letter(wrong: Prompt, rng: random.Random) -> None:
    place, letters = rng.randrange(len(wrong["ocr_text"])), list(wrong["ocr_text"])
    letters[place] = LETTERS[(LETTERS.index(letters[place]) + 1) % len(LETTERS)]
    wrong["ocr_text"] = "".join(letters)


def _two_letters(wrong: Prompt, rng: random.Random) -> None:
    letters = list(wrong["ocr_text"])
    i = rng.randrange(len(letters) - 1)
    letters[i], letters[i + 1] = letters[i + 1], letters[i]
    wrong["ocr_text"] = "".join(letters)
    if wrong["ocr_text"] in wrong["prompt"]:  # two equal letters
        _letter(wrong, rng)


CHANGES: dict[str, Callable[[Prompt, random.Random], None]] = {
    "another shape": _shape,
    "another colour": _color,
    "another size": _size,
    "one object more": _more,
    "one object fewer": _fewer,
    "relation mirrored": _mirrored,
    "an object missing": _missing,
    "colours swapped": _swapped,
    "colour spilled": _spilled,
    "another letter": _letter,
    "letters exchanged": _two_letters,
}
# What can go wrong with each kind of request.
CHANGES_OF = {
    "single_object": ("another shape", "one object more"),
    "two_object": ("another shape", "an object missing", "one object more"),
    "counting": ("one object more", "one object fewer", "another shape"),
    "colors": ("another colour", "another shape", "one object more"),
    "position": ("relation mirrored", "an object missing", "another shape"),
    "color_attr": ("colours swapped", "colour spilled", "another colour", "an object missing"),
    "ocr": ("another letter", "letters exchanged"),
}
# The values that may be a condition, by kind: those that some of its requests name.
CONDITIONS = {
    "single_object": ("small", "top left", "top right", *SHAPES),
    "two_object": ("small", *SHAPES),
    "counting": (*SHAPES, *COLORS),
    "colors": ("small", *SHAPES),
    "position": SHAPES,
    "color_attr": (*SHAPES, *COLORS),
}


def _defects(tag: str, rng: random.Random) -> tuple[Defect, ...]:
    """Draw one to three defects of a kind; the first has no condition and changes what is shown."""
    names = rng.sample(CHANGES_OF[tag], min(rng.randint(1, 3), len(CHANGES_OF[tag])))
    if len(names) > 1 and rng.random() < 0.5:
        names[-1] = rng.choice(sorted(FLAWS))
    conditions = CONDITIONS.get(tag, ())
    drawn = [Defect(name=names[0])]
    for name in names[1:]:
        conditioned = conditions and rng.random() < CONDITIONED
        drawn.append(Defect(name=name, condition=rng.choice(conditions) if conditioned else ""))
    return tuple(drawn)

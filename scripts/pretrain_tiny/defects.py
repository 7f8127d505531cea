"""The planted defects: wrong images of right captions, as often as the tier of a request says."""

import copy
import random

from flowrl.tiny.world import COLORS, MIRRORED, SHAPES, TIERS, Prompt

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVXYZ"  # W is wider than a column


def with_defects(prompt: Prompt, rng: random.Random) -> Prompt:
    """Return the prompt to draw: itself, or altered with the probability of its tier."""
    return prompt if rng.random() < TIERS[prompt["tier"]] else altered(prompt, rng)


def altered(prompt: Prompt, rng: random.Random) -> Prompt:
    """Return the prompt of a wrong image: a copy whose demands differ in one way."""
    wrong = copy.deepcopy(prompt)
    if prompt["tag"] == "ocr":
        place = rng.randrange(len(prompt["ocr_text"]))
        letters = list(prompt["ocr_text"])
        letters[place] = LETTERS[(LETTERS.index(letters[place]) + 1) % len(LETTERS)]
        return wrong | {"ocr_text": "".join(letters)}
    include = wrong["include"]
    if prompt["tag"] in ("single_object", "two_object"):
        entry = rng.choice(include)
        entry["class"] = _next(entry["class"], SHAPES, [e["class"] for e in include])
    elif prompt["tag"] == "counting":
        include[0]["count"] = {2: 3, 3: rng.choice((2, 4)), 4: 3}[include[0]["count"]]
    elif prompt["tag"] == "colors":
        include[0]["color"] = _next(include[0]["color"], COLORS, [])
    elif prompt["tag"] == "position":
        include[1]["position"][0] = MIRRORED[include[1]["position"][0]]
    else:
        a, b = include
        a["color"], b["color"] = b["color"], a["color"]
    return wrong


def _next(value: str, values: tuple[str, ...], taken: list[str]) -> str:
    """Return what follows `value` in the circle of `values` and is not taken."""
    place = values.index(value)
    turn = values[place + 1 :] + values[:place]
    return next(v for v in turn if v not in taken)

"""The prompts of the tiny world: GenEval's six kinds over coloured shapes, and short words.

A prompt is a plain dict in GenEval's JSONL form (`tag`, `prompt`, `include`, `exclude`; Ghosh et
al. 2023, arXiv 2310.11513), or `tag: ocr` with the `ocr_text` to be drawn. Everything here is
plain Python: `draw.py` turns a prompt into an image, `pretrain.py` learns from the pairs.
"""

import functools
import random
from collections.abc import Sequence
from itertools import permutations, product

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = ("red", "yellow", "green", "blue", "purple", "black")
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
WORDS = (
    "ART BED BOX BUS CAR CAT CUP DOG EGG FOX ICE JAM KEY LEG MAP OWL PEN PIG SUN TEA "
    "VAN WEB YES ZOO BIRD CAKE DUCK FROG GOLD HOME MOON TREE"
).split()
NEW_WORDS = "BAG COW HAT NET RED TOY FISH LION".split()  # held out in every wording
# Words that no pretraining has seen in any wording: what a policy can learn to spell.
UNSEEN_WORDS = (
    "ANT ARM BAT BEE BIN BOW COD DEN EAR ELF FAN FIG GUM HEN HUT INK JAR KIT LAB LIP MOP MUD NUT "
    "OAK PAN PIE RAT ROD SEA SKY TIN TOP URN VET WAX WIG YAK BALL BELL BOAT COAT CORN CRAB DEER "
    "DESK DOOR FARM FIRE GATE GOAT HAND KING LAMP LEAF LAKE MILK NOSE PARK RING ROAD ROPE SAND "
    "SHIP SOUP STAR TENT WIND"
).split()
PREFIXES = ("a photo of ", "a picture of ", "a drawing of ", "")
WORD_TEMPLATES = (
    'the word "{}"',
    'a sign with the word "{}"',
    'the text "{}"',
    'a photo of the word "{}"',
)
GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TAGS = (*GENEVAL_TAGS, "ocr")  # what pretraining draws
SPELLING = "spelling"  # tagged ocr, but of UNSEEN_WORDS
HELD_OUT = 6  # one prompt in six is never drawn in pretraining nor trained on

Prompt = dict  # {"tag", "prompt", "include": [...], "exclude": [...]} or {"tag": "ocr", "ocr_text"}


def article(noun: str) -> str:
    """'a circle', 'an orange circle'."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def one(shape: str, color: str | None = None, position: list | None = None) -> dict:
    """One GenEval `include` entry that asks for exactly one object."""
    entry: dict = {"class": shape, "count": 1}
    if color:
        entry["color"] = color
    if position:
        entry["position"] = position
    return entry


def _prompt(tag: str, prefix: str, text: str, include: list[dict], **extra) -> Prompt:
    return {"tag": tag, "prompt": prefix + text, "include": include, **extra}


def _word(template: str, word: str) -> Prompt:
    return {"tag": "ocr", "prompt": template.format(word), "ocr_text": word}


def all_prompts(tag: str) -> list[Prompt]:
    """Every prompt of one kind, in a fixed order; words that are held out altogether left out."""
    pairs = list(permutations(SHAPES, 2))
    if tag == "single_object":
        return [_prompt(tag, p, article(s), [one(s)]) for p, s in product(PREFIXES, SHAPES)]
    if tag == "two_object":
        return [
            _prompt(tag, p, f"{article(a)} and {article(b)}", [one(a), one(b)])
            for p, (a, b) in product(PREFIXES, pairs)
        ]
    if tag == "counting":
        return [
            _prompt(
                tag,
                p,
                f"{word} {plural(s)}",
                [{"class": s, "count": n}],
                exclude=[{"class": s, "count": n + 1}],
            )
            for p, (n, word), s in product(PREFIXES, NUMBERS.items(), SHAPES)
        ]
    if tag == "colors":
        return [
            _prompt(tag, p, article(f"{c} {s}"), [one(s, c)])
            for p, c, s in product(PREFIXES, COLORS, SHAPES)
        ]
    if tag == "position":
        return [
            _prompt(tag, p, f"{article(a)} {r} {article(b)}", [one(b), one(a, position=[r, 0])])
            for p, r, (a, b) in product(PREFIXES, RELATIONS, pairs)
        ]
    if tag == "color_attr":
        return [
            _prompt(
                tag, p, f"{article(f'{c} {a}')} and {article(f'{d} {b}')}", [one(a, c), one(b, d)]
            )
            for p, (c, d), (a, b) in product(PREFIXES, permutations(COLORS, 2), pairs)
        ]
    if tag == "ocr":
        return [_word(t, w) for t, w in product(WORD_TEMPLATES, WORDS)]
    raise ValueError(f"unknown kind {tag!r}; the tiny world has {', '.join(TAGS)}")


def _spelling(split: str) -> list[Prompt]:
    """Every unseen word in all wordings but one for training, and in that one for the test."""
    count = len(WORD_TEMPLATES)
    return [
        _word(template, word)
        for turn, word in enumerate(UNSEEN_WORDS)
        for place, template in enumerate(WORD_TEMPLATES)
        if (place == turn % count) == (split == "test")
    ]


@functools.cache
def split_prompts(tag: str, split: str) -> Sequence[Prompt]:
    """The prompts of one kind for 'train' or 'test'. The two never share a text.

    Held-out texts are new combinations of known parts; of the words, some are new themselves.
    Those of SPELLING are new to the pretrained pipelines in both splits.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is 'train' or 'test', not {split!r}")
    if tag == SPELLING:
        return _spelling(split)
    prompts = all_prompts(tag)
    random.Random(f"flowrl tiny world, {tag}").shuffle(prompts)
    cut = len(prompts) // HELD_OUT
    if split == "train":
        return prompts[cut:]
    new = [_word(t, w) for t, w in product(WORD_TEMPLATES, NEW_WORDS)] if tag == "ocr" else []
    return new + prompts[:cut]

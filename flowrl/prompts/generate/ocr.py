"""Prompts that ask for a written text, as in Flow-GRPO's OCR task, in our own wordings."""

import random
from collections.abc import Hashable, Sequence
from math import perm

from flowrl.errors import UserError
from flowrl.prompts.generate.templates import (
    WORDS,
    Sets,
    TemplateKind,
    apportion,
    sample_sets,
    shuffled,
)

LENGTHS = ("1 word", "2 words", "3 words", "4 words")
RATIO = (1, 3, 3, 3)
HELD_OUT = 5  # with new words, one word in five is for the held-out set alone
TEMPLATES = (
    'a shop sign that reads "{}"',
    'a poster with the words "{}" in large letters',
    'a coffee mug with "{}" printed on its side',
    'a blackboard on which someone wrote "{}" in chalk',
    'a birthday cake with "{}" in icing',
    'a wooden board at a trail, carved with "{}"',
    'the cover of a book titled "{}"',
    'a neon sign in a dark street that spells "{}"',
    'a white T-shirt with the text "{}"',
    'a postage stamp with the small print "{}"',
    'a banner above a market stall saying "{}"',
    'a paper note on a fridge with "{}" in handwriting',
    'the label of a glass jar, "{}" written on it',
    'a train platform with a display that shows "{}"',
    'a painted wall with "{}" across it',
    'a picture of the words "{}"',
)


def ocr_sets(
    count: int,
    held_out: int,
    seed: int = 0,
    *,
    words: Sequence[str] = WORDS,
    templates: Sequence[str] = TEMPLATES,
    ratio: Sequence[int] = RATIO,
    new_words: bool = False,
) -> Sets:
    """Return `count` and `held_out` prompts for one to four different words, in "ocr_text", too.

    No text is in both sets, in any case or spacing; with new_words, no word is. ratio: parts of
    texts of 1, 2, 3 and 4 words. Raises UserError when there are not enough, and for templates
    without one {} and words that cannot be quoted.
    """
    for template in templates:
        if (places := template.count("{}")) != 1:
            raise UserError(f"the template {template!r} has {places} places {{}}, expected one")
    for word in words:
        if '"' in word or len(word.split()) != 1:
            raise UserError(f"the word {word!r} has spaces or quotes, expected one plain word")
    if not new_words:
        kinds = ocr_kinds(words, templates)
        return sample_sets(kinds, count, held_out, seed, ratio=ratio, test_ratio=ratio)
    names = sorted({word.casefold() for word in words})
    random.Random(f"{seed}/words").shuffle(names)
    new_names = set(names[: -(-len(names) // HELD_OUT)])
    old = [word for word in words if word.casefold() not in new_names]
    new = [word for word in words if word.casefold() in new_names]
    taken: set[Hashable] = set()
    test = _one_set(new, templates, held_out, ratio, f"{seed}/test", taken)
    return _one_set(old, templates, count, ratio, f"{seed}/train", taken), test


def ocr_kinds(words: Sequence[str], templates: Sequence[str]) -> list[TemplateKind]:
    """Return the kinds of texts with one to four different words."""
    return [_kind(name, n, words, templates) for n, name in enumerate(LENGTHS, start=1)]


def _kind(name: str, length: int, words: Sequence[str], templates: Sequence[str]) -> TemplateKind:
    def text(index: int) -> str:
        left, chosen = list(words), []
        for _ in range(length):
            index, place = divmod(index, len(left))
            left[place], left[-1] = left[-1], left[place]
            chosen.append(left.pop())
        return " ".join(chosen)

    def make(index: int, wording: int) -> dict:
        target = text(index)
        prompt = templates[wording].replace("{}", target)
        return {"tag": "ocr", "prompt": prompt, "ocr_text": target}

    return TemplateKind(
        name=name,
        combinations=perm(len(words), length),
        wordings=len(templates),
        make=make,
        # As the OCR reward compares texts: without case and spaces.
        key=lambda index: text(index).replace(" ", "").casefold(),
    )


def _one_set(
    words: Sequence[str],
    templates: Sequence[str],
    count: int,
    ratio: Sequence[int],
    seed: str,
    taken: set[Hashable],
) -> list[dict]:
    counts = apportion(count, LENGTHS, ratio)
    kinds = ocr_kinds(words, templates)
    rows = [row for kind in kinds for row in kind.sample((counts[kind.name],), seed, taken)[0]]
    return shuffled(rows, seed)

"""Prompts that ask for a written text, as in Flow-GRPO's OCR task, in our own wordings."""

from math import perm

from flowrl.prompts.generate.templates import (
    WORDS,
    Sets,
    TemplateKind,
    sample_sets,
)

LENGTHS = ("1 word", "2 words", "3 words", "4 words")
RATIO = (1, 3, 3, 3)
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


def ocr_sets(count: int, held_out: int, seed: int = 0) -> Sets:
    """Return `count` and `held_out` prompts for one to four different words, in "ocr_text", too.

    No text is in both sets, in any case or spacing. Raises UserError when there are not enough.
    """
    kinds = [_kind(name, n) for n, name in enumerate(LENGTHS, start=1)]
    return sample_sets(kinds, count, held_out, seed, ratio=RATIO, test_ratio=RATIO)


def _kind(name: str, length: int) -> TemplateKind:
    def text(index: int) -> str:
        left, chosen = list(WORDS), []
        for _ in range(length):
            index, place = divmod(index, len(left))
            left[place], left[-1] = left[-1], left[place]
            chosen.append(left.pop())
        return " ".join(chosen)

    def make(index: int, wording: int) -> dict:
        target = text(index)
        prompt = TEMPLATES[wording].replace("{}", target)
        return {"tag": "ocr", "prompt": prompt, "ocr_text": target}

    return TemplateKind(
        name=name,
        combinations=perm(len(WORDS), length),
        wordings=len(TEMPLATES),
        make=make,
        # As the OCR reward compares texts: without case and spaces.
        key=lambda index: text(index).replace(" ", "").casefold(),
    )

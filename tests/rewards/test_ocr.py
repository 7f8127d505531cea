import math

import pytest
import torch
from flowrl_rewards.ocr import OCR, quoted
from hypothesis import assume, given
from hypothesis import strategies as st

words = st.text("ABCDEFGH abc.!", min_size=1, max_size=12).filter(str.strip)
WHITE = torch.full((1, 3, 64, 64), 0.95)


def judged(text: str, target: str, **args) -> float:
    return read_as([text], "", {"ocr_text": target}, **args)


def read_as(lines: list[str], prompt: str, metadata: dict, **args) -> float:
    made = OCR(**args)
    made._read = lambda image: lines
    scores, reasons = made(WHITE, [prompt], [metadata])
    assert not reasons
    return scores.item()


EDGES = [  # prompt, lines, score by hand
    ('a sign "OPEN"', ["OPEN"], 1),
    ('a sign "OPEN"', ["OP", "EN"], 1),
    ('a sign "OPEN"', ["EN", "OP"], 0),  # in the engine's order: "enop" is four edits away
    ('a sign "OPEN"', ["OPE"], 3 / 4),
    ('a sign "OPEN"', ["XXXXXXXXXXXX"], 0),  # a distance of 12 counts 4
    ('a sign "OPEN"', ["OPXEN is what the whole sign says"], 0),  # as long text counts against it
    ('a sign "OPEN" and "SHUT"', ["OPEN"], 1),  # with `first`, the first span alone
    ('a sign "OPEN" and "SHUT"', ["SHUT"], 0),
    ('a sign "OPEN', ["OPEN"], 1),  # to the end of the prompt
    ('a sign "don\'t"', ["dont"], 4 / 5),  # punctuation counts
    ('a sign "\uff21"', ["A"], 0),  # no Unicode folding
    ('a sign "A\u00a0B"', ["AB"], 2 / 3),  # only U+0020 is removed
    ('a sign "\u0130"', ["\u0130"], 1),  # lower() makes two characters of it, on both sides
    ('\u201cSHUT\u201d and "OPEN"', ["OPEN"], 1),  # straight quotes come first
]


def test_the_rule_is_the_published_one():
    for prompt, lines, score in EDGES:
        assert read_as(lines, prompt, {}, first=True) == pytest.approx(score), (prompt, lines)


@given(words, words)
def test_scores_lie_in_0_to_1_and_exact_text_scores_1(text, target):
    for mode in ("flow_grpo", "strict"):
        assert 0 <= judged(text, target, mode=mode) <= 1
        assert judged(target, target, mode=mode) == 1
        assert judged(target.swapcase(), target, mode=mode) == 1
        assert judged("", target, mode=mode) == 0


@given(words, words, words)
def test_spaces_do_not_matter_and_text_around_the_target_costs_in_strict_alone(a, target, b):
    assert judged(a, target) == judged(a.replace(" ", ""), " ".join(target))
    assert judged(a + target + b, target) == 1
    assert judged(a + target + b, target, mode="strict") < 1


@given(st.text("abcdefgh", min_size=1, max_size=12), st.data())
def test_one_wrong_character_of_n_costs_one_nth(target, data):
    place = data.draw(st.integers(0, len(target) - 1))
    wrong = target[:place] + "z" + target[place + 1 :]
    assume(target not in wrong)
    for mode in ("flow_grpo", "strict"):
        assert judged(wrong, target, mode=mode) == pytest.approx(1 - 1 / len(target))


def test_strict_folds_unicode_and_keeps_the_order_of_words():
    assert judged("ＣＡＦÉ", "café", mode="strict") == 1
    assert judged("SALE BIG", "big sale", mode="strict") < 1


def test_targets_are_the_quoted_spans_or_the_metadatas_texts():
    for prompt, spans in (
        ("ein Schild „GO“ und „STOP“ hier", ["GO", "STOP"]),
        ("znak „GO”", ["GO"]),
        ("„GO“ and “STOP”", ["GO", "STOP"]),
        ("ein Schild „GO", ["GO"]),
        ('a sign "GO" and "STOP"', ["GO", "STOP"]),
        ("a sign “GO” and “STOP”", ["GO", "STOP"]),
        ('a sign "GO', ["GO"]),
        ("a sign “GO", ["GO"]),
        ('a sign “GO"', ["GO"]),
        ('a sign " "', []),
        ("a sign “”", []),
        ("a sign", []),
    ):
        assert quoted(prompt) == spans, prompt
        assert OCR().targets(prompt, {}) == spans[:1], prompt
        assert OCR(mode="strict").targets(prompt, {}) == spans, prompt
        assert OCR().targets(prompt, {"ocr_text": "EXIT"}) == ["EXIT"], prompt
        assert OCR().targets(prompt, {"ocr_text": None}) == spans[:1], prompt
    assert OCR(mode="strict").targets("", {"ocr_text": ["BIG", "SALE"]}) == ["BIG", "SALE"]
    assert OCR().targets("", {"ocr_text": 2024}) == ["2024"]


def test_a_prompt_whose_text_to_draw_is_ambiguous_is_refused_and_gets_no_score():
    several, open_quote = 'a sign "GO" above "STOP"', 'a 12" wide sign that says "GO"'
    for made, wrong in ((OCR(), (several, open_quote)), (OCR("strict"), (open_quote,))):
        made._read = lambda image: ["GO"]
        for prompt in wrong:
            with pytest.raises(ValueError, match="ocr_text"):
                made.check(prompt, {})
            scores, reasons = made(WHITE, [prompt], [{}])
            assert math.isnan(scores.item()) and "ocr_text" in reasons[0]
            made.check(prompt, {"ocr_text": "GO"})
        for clear in ('a sign "GO" and one more "GO"', "a sign “GO”"):
            made.check(clear, {})
    OCR(first=True).check(several, {})
    OCR("strict").check(several, {})


def test_a_failing_engine_gives_nan_with_a_reason_and_an_empty_page_gives_zero():
    def fail_on_black(image):
        if image.max() == 0:
            raise RuntimeError("out of order")
        return []

    made = OCR()
    made._read = fail_on_black
    images = torch.cat([WHITE, 0 * WHITE])
    scores, reasons = made(images, ["", ""], [{"ocr_text": "CAT"}] * 2)
    assert scores[0] == 0 and scores[1].isnan()
    assert list(reasons) == [1] and "RuntimeError: out of order" in reasons[1]

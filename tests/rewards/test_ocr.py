import math
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.tiny.draw import draw
from flowrl.tiny.world import all_prompts
from rewards.ocr import OCR, flow_grpo_score, quoted, rapidocr_reader

words = st.text("ABCDEFGH abc.!", min_size=1, max_size=12).filter(str.strip)
WHITE = torch.full((1, 3, 64, 64), 0.95)


def judged(text: str, target: str, **args) -> float:
    made = OCR(**args)
    made._read = lambda image: [text]
    return made(WHITE, [""], [{"ocr_text": target}]).item()


@given(words, words)
def test_scores_lie_in_0_to_1_and_exact_text_scores_1(text, target):
    for mode in ("flow_grpo", "strict"):
        assert 0 <= judged(text, target, mode=mode) <= 1
        assert judged(target, target, mode=mode) == 1
        assert judged(target.swapcase(), target, mode=mode) == 1
        assert judged("", target, mode=mode) == 0


@given(words, words)
def test_spaces_do_not_matter(text, target):
    assert judged(text, target) == judged(text.replace(" ", ""), " ".join(target))


@given(words, words, words)
def test_text_around_the_target_is_free_by_the_published_rule_and_costs_in_strict(a, target, b):
    assert judged(a + target + b, target) == 1
    assert judged(a + target + b, target, mode="strict") < 1
    assert judged(a + target + b, target, mode="strict", extra_text=False) == 1


@given(st.text("abcdefgh", min_size=1, max_size=12), st.data())
def test_one_wrong_character_of_n_costs_one_nth(target, data):
    place = data.draw(st.integers(0, len(target) - 1))
    wrong = target[:place] + "z" + target[place + 1 :]
    assume(target not in wrong)
    for mode in ("flow_grpo", "strict"):
        assert judged(wrong, target, mode=mode) == pytest.approx(1 - 1 / len(target))


def test_lines_are_joined_with_nothing_between():
    assert flow_grpo_score(["HEL", "LO"], "hello") == 1


def test_strict_folds_unicode_and_can_ignore_the_order_of_words():
    assert judged("ＣＡＦÉ", "café", mode="strict") == 1
    assert judged("SALE BIG", "big sale", mode="strict") < 1
    assert judged("SALE BIG", "big sale", mode="strict", word_order=False) == 1


@pytest.mark.parametrize(
    "prompt, spans",
    [
        ('a sign "GO" and "STOP"', ["GO", "STOP"]),
        ("a sign \u201cGO\u201d", ["GO"]),
        ('a sign "GO', ["GO"]),
        ('a sign ""', []),
        ("a sign", []),
    ],
)
def test_targets_are_the_quoted_spans(prompt, spans):
    assert quoted(prompt) == spans
    assert OCR().targets(prompt, {}) == spans[:1]
    assert OCR(mode="strict").targets(prompt, {}) == spans
    assert OCR().applies(prompt, {}) == bool(spans)
    assert OCR().targets(prompt, {"ocr_text": "EXIT"}) == ["EXIT"]


def test_a_prompt_without_text_is_missing_and_not_zero():
    made = OCR()
    made._read = lambda image: ["CAT"]
    assert math.isnan(made(WHITE, ["a cat"], [{}]).item())


def test_a_failing_engine_gives_nan_and_an_empty_page_gives_zero():
    def fail_on_black(image):
        if image.max() == 0:
            raise RuntimeError("engine died")
        return []

    made = OCR()
    made._read = fail_on_black
    images = torch.cat([WHITE, 0 * WHITE])
    scores = made(images, ["", ""], [{"ocr_text": "CAT"}] * 2)
    assert scores[0] == 0 and scores[1].isnan()
    with pytest.raises(RuntimeError, match="engine died"):
        made(0 * WHITE, [""], [{"ocr_text": "CAT"}])


def test_a_reward_is_cheap_to_make_and_wrong_modes_are_refused():
    assert OCR()._read is None
    with pytest.raises(ValueError, match="flow_grpo, strict"):
        OCR(mode="loose")


@pytest.fixture(scope="module")
def reader():
    return rapidocr_reader()


def test_drawn_words_are_read(reader):
    prompts = all_prompts("ocr")[:40]  # every word of the vocabulary once
    rng = random.Random(3)
    images = np.stack([draw(prompt, rng) for prompt in prompts])
    made = OCR()
    made._read = reader
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    scores = made(tensor, [p["prompt"] for p in prompts], prompts)
    assert (scores == 1).float().mean() >= 0.97
    shifted = made(tensor, [""] * 40, prompts[1:] + prompts[:1])
    assert (shifted == 1).float().mean() <= 0.05


def test_reading_is_repeatable_and_does_not_depend_on_what_came_before(reader):
    rng = random.Random(4)
    first, second = (draw(all_prompts("ocr")[i], rng)[..., ::-1].copy() for i in (0, 5))
    blank = np.full((64, 64, 3), 240, np.uint8)
    alone = reader(first)
    assert alone and reader(blank) == []
    reader(second)
    assert reader(first) == alone


def test_large_pictures_are_read_too(reader):
    small = draw(all_prompts("ocr")[1], random.Random(5))[..., ::-1]
    page = np.full((512, 512, 3), 235, np.uint8)
    page[200:328, 100:228] = small.repeat(2, 0).repeat(2, 1)
    assert "".join(reader(page)).upper() == all_prompts("ocr")[1]["ocr_text"]

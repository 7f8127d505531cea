"""RapidOCR on images of real words, drawn with Pillow."""

import random
import time

import numpy as np
import pytest
import torch
from flowrl_rewards.ocr import MODES, OCR, rapidocr_reader
from PIL import Image, ImageDraw, ImageFont

from flowrl.tiny.draw import draw
from flowrl.tiny.world import all_prompts


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
    scores, _ = made(tensor, [p["prompt"] for p in prompts], prompts)
    assert (scores == 1).float().mean() >= 0.97
    shifted, _ = made(tensor, [""] * 40, prompts[1:] + prompts[:1])
    assert (shifted == 1).float().mean() <= 0.05


def test_reading_is_repeatable_and_does_not_depend_on_what_came_before(reader):
    """Small and large, dark and blank images between: the same words, to the letter."""
    rng = random.Random(4)
    page = np.full((512, 512, 3), 235, np.uint8)
    images = [draw(all_prompts("ocr")[i], rng)[..., ::-1].copy() for i in (0, 5, 9)]
    images += [np.full((64, 64, 3), 240, np.uint8), page, 0 * page]
    alone = [reader(image) for image in images]
    assert all(alone[:3]) and alone[3:] == [[], [], []]
    for _ in range(2):
        order = rng.sample(range(len(images)), len(images))
        assert [reader(images[i]) for i in order] == [alone[i] for i in order]


def test_fixtures_are_judged_in_their_right_order(reader):
    for mode in MODES:
        made = OCR(mode)
        made._read = reader
        for item in made.fixtures():
            images = torch.stack([item["better"], item["worse"]])
            scores, _ = made(images, [item["prompt"]] * 2, [item["metadata"]] * 2)
            assert scores[0] > scores[1], item["says"]


WORDS = """
adventure airport apple autumn bakery balance bicycle biscuit blanket bookshop breakfast bridge
butter camera candle castle caution cheese chicken chocolate cinema circus closed coffee comet
concert cookies corner cotton danger dentist desert diamond dinner doctor dragon dream eagle
electric elephant engine entrance evening express factory farm festival fire flower forest freedom
friday fruit future galaxy garden gallery ghost giant ginger green guitar hammer harbour harvest
hello holiday honey hospital hotel island jacket journey jungle kitchen ladder laundry lemon
library lobster lucky magic market menu midnight milk mirror monday money morning mountain museum
music mystery nature never night november ocean office open orange orchard paper parade parking
peace pencil pepper piano picnic pilot pirate pizza planet police powder puzzle quality quiet
rabbit radio railway record repair rescue river robot rocket sale school secret shadow silver smile
spring station storm street sugar summer sunday sunset theatre thunder ticket tomato tower traffic
travel tunnel umbrella victory village violet volcano wagon warning water welcome whisper window
winter wonder yellow yoga zebra zoo 2024 1999 24h 50% No.7 A4 B12 Wi-Fi Room101
""".split()
SIZES = (64, 96, 128, 256, 512)


def rendered(word: str, size: int, rng: random.Random, light: bool) -> np.ndarray:
    """A word across 50 to 92 % of a square image, anywhere in it: (size, size, 3) uint8."""
    ink, paper = rng.randint(0, 60), rng.randint(190, 255)
    canvas = Image.new("RGB", (size, size), (ink if light else paper,) * 3)
    pen = ImageDraw.Draw(canvas)
    long = pen.textlength(word, font=ImageFont.load_default(40))
    font = ImageFont.load_default(min(40 * rng.uniform(0.5, 0.92) * size / long, size / 2))
    left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
    spare = size - (right - left), size - (bottom - top)
    x, y = (rng.uniform(0.02 * size, max(0.02 * size, room - 0.02 * size)) for room in spare)
    pen.text((x - left, y - top), word, font=font, fill=(paper if light else ink,) * 3)
    return np.asarray(canvas)


def share_read(read, size: int, count: int) -> float:
    """The share of `count` clean words, dark on light and light on dark, that are read exactly."""
    rng, wrong, seconds = random.Random(size), [], 0.0
    for i in range(count):
        word = rng.choice([str.upper, str.capitalize, str])(rng.choice(WORDS))
        image = np.ascontiguousarray(rendered(word, size, rng, bool(i % 2))[..., ::-1])
        began = time.perf_counter()
        lines = read(image)
        seconds += time.perf_counter() - began
        if "".join(lines).replace(" ", "").lower() != word.lower():  # as the rule compares
            wrong.append((word, lines))
    share = 1 - len(wrong) / count
    print(f"{size} pixels: {share:.1%} read, {1000 * seconds / count:.0f} ms each, but {wrong}")
    return share


def test_clean_words_are_read_at_every_size(reader):
    assert np.mean([share_read(reader, size, 8) for size in SIZES]) >= 0.98


@pytest.mark.slow
def test_98_percent_of_clean_words_are_read_at_every_size(reader):
    assert min(share_read(reader, size, 300) for size in SIZES) >= 0.98


def test_large_images_are_read_too(reader):
    small = draw(all_prompts("ocr")[1], random.Random(5))[..., ::-1]
    page = np.full((512, 512, 3), 235, np.uint8)
    page[200:328, 100:228] = small.repeat(2, 0).repeat(2, 1)
    assert "".join(reader(page)).upper() == all_prompts("ocr")[1]["ocr_text"]

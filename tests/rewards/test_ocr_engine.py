"""RapidOCR on images of real words, drawn with Pillow."""

import random

import numpy as np
import pytest
import torch
from flowrl_rewards.ocr import OCR, rapidocr_reader
from PIL import Image, ImageDraw, ImageFont

from flowrl.tiny.world import all_prompts
from scripts.pretrain_tiny.draw import draw


@pytest.fixture(scope="module")
def reader():
    return rapidocr_reader()


def test_drawn_words_are_read(reader):
    prompts = all_prompts("ocr")[::4][:40]  # 40 words, in one wording each
    rng = random.Random(3)
    images = np.stack([draw(prompt, rng) for prompt in prompts])
    made = OCR()
    made._read = reader
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    scores, _ = made(tensor, [p["prompt"] for p in prompts], prompts)
    assert (scores == 1).float().mean() >= 0.97
    shifted, _ = made(tensor, [""] * 40, prompts[1:] + prompts[:1])
    assert (shifted == 1).float().mean() <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 96, 128, 256, 512])
def test_clean_words_are_read_at_all_sizes(reader, size):
    """The figures of docs/rewards.md, printed with `-s`: dark on light, and light on dark."""
    rng = random.Random(size)
    words = sorted({prompt["ocr_text"] for prompt in all_prompts("ocr")})
    right = 0
    for i in range(300):
        word, ink = words[i % len(words)], 20 if i % 2 else 235
        image = Image.new("RGB", (size, size), (255 - ink,) * 3)
        pen, share = ImageDraw.Draw(image), rng.uniform(0.5, 0.9)  # of the image's width
        width = pen.textlength(word, ImageFont.load_default(size))
        font = ImageFont.load_default(size * share * size / width)
        pen.text((size / 2, size / 2), word, fill=(ink,) * 3, font=font, anchor="mm")
        right += "".join(reader(np.asarray(image))).upper() == word
    print(f"{size} pixels: {right / 300:.1%} of 300 words read exactly")
    assert right == 300

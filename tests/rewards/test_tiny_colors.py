"""The colour reward on squares painted by hand and on images of the drawing program."""

import random

import numpy as np
import torch
from flowrl_rewards.tiny_colors import COLORS, PAPER, TinyColors, named_colors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.tiny.world import all_prompts
from scripts.pretrain_tiny import draw as program

colors = st.sampled_from(tuple(COLORS))


def painted(*squares: tuple[str, int], size: int = 64, side: int = 22) -> Tensor:
    """(1, 3, size, size) float64 paper with squares (colour, left), none of them beyond it."""
    image = (torch.tensor(PAPER).double() / 255)[None, :, None, None].repeat(1, 1, size, size)
    for color, left in squares:
        level = torch.tensor(COLORS[color]).double() / 255
        image[:, :, 8 : 8 + side, left : left + side] = level[:, None, None]
    return image


def score(image: Tensor, prompt: str) -> float:
    return TinyColors()(image, [prompt], [{}]).item()


def test_colours_are_whole_words_outside_of_quotes():
    for prompt, names in [
        ("a Red circle and a blue square", ["red", "blue"]),
        ("a red circle and a red star", ["red"]),
        ("three stars", []),
        ("a bored, blackened bluebird", []),
        ('the word "RED"', []),
        ('a green sign "RED', ["green"]),
        ("a sign \u201cBLUE\u201d, yellow", ["yellow"]),
    ]:
        assert named_colors(prompt) == names
        assert TinyColors().applies(prompt, {}) == bool(names)


@given(colors, colors)
def test_right_colour_beats_wrong_colour_beats_no_object(asked, other):
    right, wrong, none = (
        score(image, f"a {asked} square")
        for image in (painted((asked, 8)), painted((other, 8)), painted())
    )
    assert right > 0.9 and none < 1e-3
    assert asked == other or none + 0.01 < wrong < 0.1


@given(colors)
def test_painting_the_background_does_not_pay(color):
    prompt = f"a {color} circle"
    sides = (22, 32, 40, 48, 56)  # up to all of the 56 pixels that are left
    falling = [score(painted((color, 8), side=side), prompt) for side in sides]
    assert falling == sorted(falling, reverse=True)
    everywhere = torch.tensor(COLORS[color]).double()[None, :, None, None].expand(1, 3, 64, 64)
    assert score(everywhere / 255, prompt) < 0.01 < falling[0] - 0.9


def test_drawn_images_score_high_and_those_of_other_colours_low():
    for tag in ("colors", "color_attr"):
        rng = random.Random(tag)
        asked = [rng.choice(all_prompts(tag)) for _ in range(100)]
        drawn = torch.from_numpy(np.stack([program.draw(prompt, rng) for prompt in asked]))
        images, prompts = drawn.permute(0, 3, 1, 2) / 255, [prompt["prompt"] for prompt in asked]
        metadata: list[dict] = [{}] * len(prompts)
        right = TinyColors()(images, prompts, metadata)
        small = torch.tensor(["small" in prompt for prompt in prompts])
        assert right[~small].mean() > 0.88 and right[~small].min() > 0.75
        assert small.sum() == 0 or right[small].min() > 0.5  # a third of the pixels
        others = prompts[1:] + prompts[:1]
        disjoint = [
            not set(named_colors(a)) & set(named_colors(b))
            for a, b in zip(prompts, others, strict=True)
        ]
        wrong = TinyColors()(images, others, metadata)[torch.tensor(disjoint)]
        assert len(wrong) > 30 and wrong.mean() < 0.06 and wrong.max() < 0.15

"""The second judge: it agrees with the drawing program, and accepts nothing half-drawn."""

import random
from itertools import zip_longest

import pytest
import torch
import torch.nn.functional as F
from flowrl_rewards.tiny_judge import QUARTERS, TinyJudge, meets

from flowrl.tiny.world import TAGS, split_prompts
from scripts.pretrain_tiny.defects import altered
from scripts.pretrain_tiny.draw import draw

EACH = 10  # prompts of a kind


@pytest.fixture(scope="module")
def prompts():
    return [prompt for tag in TAGS for prompt in split_prompts(tag, "test")[:EACH]]


@pytest.fixture(scope="module")
def judge():
    return TinyJudge()


def drawn(prompts) -> torch.Tensor:
    images = [torch.from_numpy(draw(p, random.Random(i)).copy()) for i, p in enumerate(prompts)]
    return torch.stack(images).permute(0, 3, 1, 2) / 255


def verdicts(judge, images, prompts) -> torch.Tensor:
    return judge(images, [p["prompt"] for p in prompts], prompts)


def test_it_agrees_with_the_drawing_program(judge, prompts):
    """On requests that are met, and on those altered in one way, as the planted defects are."""
    assert verdicts(judge, drawn(prompts), prompts).mean() >= 0.99
    wrong = [altered(prompt, random.Random(i)) for i, prompt in enumerate(prompts)]
    assert verdicts(judge, drawn(wrong), prompts).mean() <= 0.01


def test_it_accepts_no_object_that_is_not_whole(judge, prompts):
    images = drawn(prompts)
    paper = images[:, :, :1, :1]
    spoiled = {
        "faded": images.lerp(paper, 0.6),
        "cut": torch.where(torch.arange(64) % 32 < 16, paper, images),
        "blurred": F.avg_pool2d(F.pad(images, (4, 4, 4, 4), mode="replicate"), 9, stride=1),
        "mixed": images.lerp(images.roll(EACH, 0), 0.5),
        "empty": paper.expand_as(images),
    }
    for name, broken in spoiled.items():
        assert verdicts(judge, broken, prompts).mean() <= 0.02, name


def test_a_request_is_met_by_all_that_it_asks_for_and_nothing_else():
    circle, square = ("circle", "red", ""), ("square", "blue", "small")

    def met(include: list[dict], *quarters) -> bool:
        image = dict(zip_longest(QUARTERS, quarters))
        return meets(list(image.values()), [], {"include": include})

    a, b = {"class": "circle", "count": 1}, {"class": "square", "count": 1}
    assert met([a], circle) and not met([a]) and not met([a], circle, square)
    assert met([a | {"color": "red"}], circle) and not met([a | {"color": "blue"}], circle)
    assert met([b | {"size": "small"}], square) and not met([a | {"size": "small"}], circle)
    assert met([a | {"place": "top right"}], None, circle)
    assert not met([a | {"place": "top right"}], circle)
    assert met([a | {"count": 2}], circle, circle) and not met([a | {"count": 3}], circle, circle)
    left = [b, a | {"position": ["left of", 0]}]  # the circle is left of the square
    assert met(left, circle, square) and not met(left, square, circle)
    assert not met(left, circle, None, None, square)  # they share no row
    assert not met([a], "other") and not met([a], circle, "other")


def test_prompts_of_other_worlds_are_not_judged(judge):
    scores = judge(torch.zeros(2, 3, 64, 64), ["a cat", "TEN"], [{}, {"ocr_text": "TEN"}])
    assert scores.isnan().all()

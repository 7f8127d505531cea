import itertools
import random

import torch
from flowrl_rewards.detectors.tiny import TinyDetector
from flowrl_rewards.detectors.tiny_shapes import SHAPES
from flowrl_rewards.fixtures import NAMED, SPOTS, blank, noise, shapes, square, word
from flowrl_rewards.images import to_uint8
from flowrl_rewards.tiny_palette import COLORS, PAPER

IMAGES = {
    "square": lambda size: square("red", size),
    "blank": blank,
    "noise": noise,
    "word": lambda size: word("HELLO", size),
    "shapes": lambda size: shapes([("star", "blue"), ("ring", "green")], size),
}


def test_images_are_what_a_file_would_hold_and_the_same_every_time():
    for name, make in IMAGES.items():
        for size in (64, 128, 224):
            image = make(size)
            assert image.shape == (3, size, size) and image.dtype == torch.float32, name
            levels = image * 255
            assert levels.min() >= 0 and levels.max() <= 255, name
            assert torch.equal(levels.round() / 255, image), name
            assert torch.equal(image, make(size)), name


def test_a_square_has_its_colour_in_the_middle_and_paper_around():
    for color in NAMED:
        levels = to_uint8(square(color, 96)[None])[0]
        assert tuple(levels[48, 48]) == NAMED[color]
        assert tuple(levels[2, 2]) == tuple(levels[93, 48]) == PAPER


def test_a_blank_image_is_paper_and_noise_depends_on_its_seed_alone():
    assert (to_uint8(blank(32)[None]) == PAPER[0]).all()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = noise(32, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, noise(32, seed=2))
    assert 0.45 < first.mean() < 0.55


def test_the_detector_of_the_tiny_world_finds_every_shape_and_colour():
    for size in [64, 128, 256]:
        detector, rng = TinyDetector(), random.Random(0)
        wanted = [[pair] for pair in itertools.product(SHAPES, COLORS)]
        for count in SPOTS:
            for _ in range(12):
                picked = zip(
                    rng.sample(SHAPES, count), rng.sample(list(COLORS), count), strict=True
                )
                wanted.append(list(picked))
        for objects in wanted:
            (found,) = detector(to_uint8(shapes(objects, size)[None]))
            assert sorted((d.name, d.color) for d in found) == sorted(objects)

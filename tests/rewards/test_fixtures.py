import itertools
import random

import torch
from flowrl_rewards.detectors.tiny import TinyDetector
from flowrl_rewards.detectors.tiny_shapes import SHAPES
from flowrl_rewards.fixtures import SPOTS, blank, noise, shapes, square, word
from flowrl_rewards.images import to_uint8
from flowrl_rewards.tiny_palette import COLORS

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

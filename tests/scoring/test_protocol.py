"""What travels: pixels come back as they were, and nothing that is sent can do harm."""

import json
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flowrl.scoring.protocol import (
    Response,
    decode,
    encode,
)

SHAPES = array_shapes(min_dims=2, max_dims=2, max_side=40).map(lambda shape: (*shape, 3))
IMAGE = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3) * 4
MANY = 10**6  # pixels


@given(image=arrays(np.uint8, SHAPES))
def test_every_pixel_comes_back(image):
    back = decode(encode(image), max_pixels=MANY)
    assert back.dtype == np.uint8 and np.array_equal(back, image)


@given(data=st.binary(max_size=200))
def test_anything_else_is_a_value_error(data):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("it was unpickled",)

    for wrong in (data, encode(IMAGE)[: min(len(data), 60)], pickle.dumps(Trap())):
        with pytest.raises(ValueError):
            decode(wrong, max_pixels=MANY)


def png(height: int, width: int) -> bytes:
    """A file that says it holds an image of this size."""
    data = bytearray(encode(IMAGE))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "bomb",
    [png(8000, 20000), png(60000, 60000)],  # where Pillow itself gives up
)
def test_a_bomb_is_refused_before_it_unfolds(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            decode(bomb, max_pixels=MANY)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@given(score=st.floats())
def test_finite_scores_travel_exactly_and_others_as_null(score):
    head = {"protocol": 1, "reward": "ocr", "key": "k"}
    sent = Response.model_validate(head | {"results": [{"id": "0", "score": score}]})
    (back,) = json.loads(sent.model_dump_json())["results"]
    assert back["score"] == (score if np.isfinite(score) else None)

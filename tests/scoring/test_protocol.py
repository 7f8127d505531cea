"""What travels: pixels come back as they were, and nothing that is sent can do harm."""

import io
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
from PIL import Image
from pydantic import ValidationError

from flowrl.scoring.protocol import (
    CODECS,
    LOSSLESS,
    Response,
    Result,
    ScoreRequest,
    decode,
    encode,
    error_message,
)

SHAPES = array_shapes(min_dims=2, max_dims=2, max_side=40).map(lambda shape: (*shape, 3))
IMAGES = arrays(np.uint8, SHAPES)
IMAGE = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3) * 4

ITEM = {"id": "0", "prompt": "a cat"}
QUESTION = {"protocol": 1, "reward": "ocr", "key": "k", "codec": "png", "items": [ITEM]}


@given(codec=st.sampled_from(LOSSLESS), image=IMAGES)
def test_lossless_codecs_give_every_pixel_back(codec, image):
    data = encode(image, codec)
    back = decode(data, codec)
    assert back.dtype == np.uint8 and np.array_equal(back, image)
    assert np.array_equal(decode(encode(back, codec), codec), image)


@given(codec=st.sampled_from(list(CODECS)), data=st.binary(max_size=200))
def test_anything_else_is_a_value_error(codec, data):
    with pytest.raises(ValueError):
        decode(data, codec)
    with pytest.raises(ValueError):
        decode(encode(IMAGE, codec)[: len(data)], codec)


def test_codecs_read_their_own_rgb_files_alone(tmp_path):
    for codec in CODECS:
        for other in set(CODECS) - {codec}:
            with pytest.raises(ValueError):
                decode(encode(IMAGE, other), codec)
    # Images of other modes are refused.
    for mode in ["RGBA", "L", "P", "CMYK", "I;16"]:
        buffer = io.BytesIO()
        kind = "JPEG" if mode == "CMYK" else "PNG"
        Image.new(mode, (2, 2)).save(buffer, kind)
        with pytest.raises(ValueError, match="expected RGB of 8 bits"):
            decode(buffer.getvalue(), "jpeg" if mode == "CMYK" else "png")
    # A pickle is never loaded.
    for codec in CODECS:

        class Trap:
            def __reduce__(self):
                return open, (str(tmp_path / "sprung"), "w")

        for data in (pickle.dumps(Trap()), struct.pack("<II", 1, 1) + pickle.dumps(Trap())):
            with pytest.raises(ValueError):
                decode(data, codec)
        assert not list(tmp_path.iterdir())
    # More pixels than allowed are refused.
    for codec in CODECS:
        assert decode(encode(IMAGE, codec), codec, max_pixels=20).shape == (5, 4, 3)
        with pytest.raises(ValueError, match="5 x 4 pixels; expected 1 to 19"):
            decode(encode(IMAGE, codec), codec, max_pixels=19)
    # Jpeg alone changes pixels and only a little.
    assert set(CODECS) - set(LOSSLESS) == {"jpeg"}
    y, x = np.mgrid[:64, :64]
    smooth = np.stack([4 * x, 4 * y, 2 * (x + y)], -1).astype(np.uint8)
    back = decode(encode(smooth, "jpeg"), "jpeg")
    off = np.abs(back.astype(int) - smooth)
    assert 0 < off.mean() < 1.5


def png(height: int, width: int, pixels: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


ZEROS = bytes(50 * 2**20)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_before_they_unfold():
    for codec, bomb in [
        ("png", png(8000, 20000, b"")),
        ("png", png(60000, 60000, b"")),  # where Pillow itself gives up
        ("raw-zlib", struct.pack("<II", 60000, 60000) + zlib.compress(ZEROS)),
        ("raw-zlib", struct.pack("<II", 4, 4) + zlib.compress(ZEROS)),
        ("raw-zlib", struct.pack("<II", 2**32 - 1, 2**32 - 1)),
        ("raw-zlib", struct.pack("<II", 0, 0)),
    ]:
        tracemalloc.start()
        try:
            with pytest.raises(ValueError):
                decode(bomb, codec)
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


def test_what_is_not_a_score_is_missing_or_refused():
    # What is not finite is written as null.
    for value in [float("nan"), float("inf"), float("-inf"), None]:
        assert json.loads(Result(id="0", score=value).model_dump_json())["score"] is None
    # What is not finite is read as missing.
    for text in ["NaN", "Infinity", "-Infinity", "1e999", "null"]:
        assert Result.model_validate_json(f'{{"id": "0", "score": {text}}}').score is None
    # What is no number is no score.
    for text in ['"0.5"', "true", "[0.5]", "{}"]:
        with pytest.raises(ValidationError):
            Result.model_validate_json(f'{{"id": "0", "score": {text}}}')


@given(score=st.floats(allow_nan=False, allow_infinity=False))
def test_scores_travel_exactly(score):
    head = {"protocol": 1, "reward": "ocr", "key": "k"}
    sent = Response.model_validate(head | {"results": [{"id": "0", "score": score}]})
    (back,) = Response.model_validate_json(sent.model_dump_json()).results
    assert back.score == score


def test_a_wrong_question_is_explained_in_one_sentence():
    for change, says in [
        ({"protocol": 2}, "protocol: "),
        ({"codec": "bmp"}, "codec: "),
        ({"items": []}, "items: "),
        ({"items": [ITEM, ITEM]}, "two of them have the same id"),
        ({"items": [ITEM | {"path": "a.png"}]}, "items.0.path: Extra inputs"),
        ({"promts": []}, "promts: Extra inputs"),
        ({"key": ""}, "key: "),
        ({"reward": None}, "reward: "),
    ]:
        assert ScoreRequest.model_validate(QUESTION).items[0].metadata == {}
        with pytest.raises(ValidationError) as caught:
            ScoreRequest.model_validate(QUESTION | change)
        sentence = error_message(caught.value)
        assert says in sentence and "\n" not in sentence

"""Protocol of reward servers (docs/reward-servers.md): encoded images and JSON, never pickles."""

import io
import math
import struct
import zlib
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

PROTOCOL = 1
MAX_PIXELS = 4096 * 4096  # of all images in one request: 16 of 1024 x 1024
Codec = Literal["png", "webp-lossless", "raw-zlib", "raw", "jpeg"]
CODECS: tuple[Codec, ...] = get_args(Codec)
LOSSLESS: tuple[Codec, ...] = tuple(codec for codec in CODECS if codec != "jpeg")

TOKEN_RULE = "must be of visible ASCII characters, without spaces: it travels in an HTTP header"

_SIZE = struct.Struct("<II")  # height and width before the pixels of raw and raw-zlib
_SAVED: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    # The fastest setting is as small as the next ones on grainy images.
    "webp-lossless": {"format": "WEBP", "lossless": True, "method": 0, "quality": 20},
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}


def encode(image: np.ndarray, codec: Codec) -> bytes:
    """Encode an image (H, W, 3) uint8 RGB; every codec but jpeg gives the same pixels back."""
    if codec in ("raw", "raw-zlib"):
        pixels = image.tobytes()
        return _SIZE.pack(*image.shape[:2]) + (
            pixels if codec == "raw" else zlib.compress(pixels, 1)
        )
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, **_SAVED[codec])
    return buffer.getvalue()


def decode(data: bytes, codec: Codec, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode an image, (H, W, 3) uint8 RGB.

    Raises ValueError for anything else, and for more than `max_pixels` before they are unpacked.
    """
    if codec in ("raw", "raw-zlib"):
        return _decode_raw(data, codec, max_pixels)
    from PIL import Image, UnidentifiedImageError

    kind = _SAVED[codec]["format"]
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            _check_size(image.height, image.width, max_pixels)
            if image.mode != "RGB":
                raise ValueError(f"is a {kind} of mode {image.mode}; expected RGB of 8 bits")
            return np.array(image)
    except ValueError:
        raise
    except Exception as error:  # Pillow has no common class for what it finds in broken files
        detail = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise ValueError(f"is no readable {kind}{detail}") from error


def _decode_raw(data: bytes, codec: Codec, max_pixels: int) -> np.ndarray:
    if len(data) < _SIZE.size:
        raise ValueError(f"has {len(data)} bytes; {codec} starts with {_SIZE.size} for its size")
    height, width = _SIZE.unpack_from(data)
    _check_size(height, width, max_pixels)
    wanted = height * width * 3
    if codec == "raw":
        if len(data) != _SIZE.size + wanted:
            raise ValueError(f"does not hold the {wanted} bytes of {height} x {width} RGB pixels")
        return np.frombuffer(data, np.uint8, offset=_SIZE.size).reshape(height, width, 3)
    stream = zlib.decompressobj()
    try:
        pixels = stream.decompress(data[_SIZE.size :], wanted + 1)
    except zlib.error as error:
        raise ValueError(f"is no readable raw-zlib: {error}") from error
    if len(pixels) != wanted or not stream.eof:
        raise ValueError(f"does not hold the {wanted} bytes of {height} x {width} RGB pixels")
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if not 0 < height * width <= max_pixels:
        raise ValueError(f"has {height} x {width} pixels; expected 1 to {max_pixels} in all")


def is_sendable(token: str) -> bool:
    """Return whether the token keeps TOKEN_RULE."""
    return all("!" <= character <= "~" for character in token)


class _StrictModel(BaseModel):
    """Unknown keys are errors: a misspelt one must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class Item(_StrictModel):
    """One image and its prompt."""

    id: str
    prompt: str
    metadata: dict[str, Any] = {}
    image: str | None = None  # base64, in the JSON form only


class ScoreRequest(_StrictModel):
    """The body of POST /v1/score."""

    protocol: Literal[1]
    reward: str
    key: Annotated[str, Field(min_length=1, max_length=200)]  # the same for every try
    codec: Codec
    items: Annotated[list[Item], Field(min_length=1)]

    @field_validator("items")
    @classmethod
    def _distinct(cls, items: list[Item]) -> list[Item]:
        if len({item.id for item in items}) < len(items):
            raise ValueError("two of them have the same id")
        return items


class _WithComponents(BaseModel):
    """Says nothing of components where there are none, as servers before them."""

    @model_serializer(mode="wrap")
    def _sparse(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in write(self).items() if v or k != "components"}


def _finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


class Result(_WithComponents):
    """One image's score, or why there is none. What is not finite is written as null."""

    id: str
    score: Annotated[float | None, Field(strict=True), AfterValidator(_finite)] = None
    error: str | None = None
    # Of the reward's components, if it has some; `score` is the first of them.
    components: dict[str, Annotated[float | None, Field(strict=True), AfterValidator(_finite)]] = {}


class Response(BaseModel):
    """The answer of POST /v1/score, in the order of the items."""

    protocol: Literal[1]
    reward: str
    version: str = ""
    key: str
    results: list[Result]


class RewardInfo(_WithComponents):
    """What a server says of one reward; see the attributes in `flowrl_rewards`."""

    name: str
    version: str = ""
    scope: Literal["sample", "group"] = "sample"
    bounds: tuple[float | None, float | None] = (None, None)
    required_metadata: list[str] = []
    deterministic: bool = True
    components: list[str] = []
    differentiable: Literal[False] = False


class Info(BaseModel):
    """The answer of GET /v1/info."""

    protocol: Literal[1]
    rewards: list[RewardInfo]
    codecs: list[str] = ["png"]
    forms: list[str] = ["json"]
    max_batch: Annotated[int, Field(ge=1)] = 16  # items in a request
    max_body: Annotated[int, Field(ge=1)] = 64 * 2**20  # bytes of a request
    max_pixels: Annotated[int, Field(ge=1)] = 2**26  # of all images of a request

    def limit(self, height: int, width: int) -> int:
        """Return the most images of that size in a request, at least 1."""
        return max(1, min(self.max_batch, self.max_pixels // (height * width)))


class Refusal(BaseModel):
    """The body of every answer that is not 200."""

    error: str


def error_message(error: ValidationError) -> str:
    """Describe the first error of a message in one sentence."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])

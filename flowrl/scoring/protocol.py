"""Protocol of reward servers (docs/reward-servers.md): JSON, with images in base64."""

import io
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from flowrl.utils.templates import finite_or_none

PROTOCOL = 1


# --- images ---------------------------------------------------------------------------------------


def encode(image: np.ndarray) -> bytes:
    """Encode an image (H, W, 3) uint8 RGB as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def decode(data: bytes, *, max_pixels: int) -> np.ndarray:
    """Decode a PNG file: (H, W, 3) uint8 RGB.

    Raises ValueError for anything else, and for more than `max_pixels` before they are unpacked.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if not 0 < image.height * image.width <= max_pixels:
                raise ValueError(
                    f"has {image.height} x {image.width} pixels; expected 1 to {max_pixels} in all"
                )
            if image.mode != "RGB":
                raise ValueError(f"is a PNG of mode {image.mode}; expected RGB of 8 bits")
            return np.array(image)
    except ValueError:
        raise
    except Exception as error:  # Pillow has no common class for broken files
        raise ValueError(f"is no readable PNG: {error}") from error


# --- messages -------------------------------------------------------------------------------------


class _StrictModel(BaseModel):
    """Unknown keys are errors: a misspelt one must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class Item(_StrictModel):
    """One image and its prompt."""

    id: str
    prompt: str
    metadata: dict[str, Any] = {}
    image: Base64Bytes  # a PNG file


class ScoreRequest(_StrictModel):
    """The body of POST /v1/score."""

    protocol: Literal[1]
    reward: str
    key: Annotated[str, Field(min_length=1, max_length=200)]  # the same for every try
    items: Annotated[list[Item], Field(min_length=1)]


Score = Annotated[float | None, Field(strict=True), AfterValidator(finite_or_none)]


class Result(BaseModel):
    """One image's score, or why there is none. NaN and infinity are written as null."""

    id: str
    score: Score = None
    error: str | None = None


class Response(BaseModel):
    """The answer to POST /v1/score, in the order of the items."""

    protocol: Literal[1]
    reward: str
    version: str = ""
    key: str
    results: list[Result]


class RewardInfo(BaseModel):
    """Attributes of one reward; see `flowrl_rewards`."""

    name: str
    version: str = ""
    scope: Literal["sample", "group"] = "sample"
    bounds: tuple[float | None, float | None] = (None, None)
    required_metadata: tuple[str, ...] = ()
    deterministic: bool = True


class Info(BaseModel):
    """The answer to GET /v1/info."""

    protocol: Literal[1]
    rewards: list[RewardInfo]
    max_batch: Annotated[int, Field(ge=1)] = 16  # items of a request
    max_pixels: Annotated[int, Field(ge=1)] = 2**26  # of all images of a request

    def max_images(self, height: int, width: int) -> int:
        """Return the most images of that size in a request, at least 1."""
        return max(1, min(self.max_batch, self.max_pixels // (height * width)))


def error_message(error: ValidationError) -> str:
    """Describe the first error of a message in one sentence."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])

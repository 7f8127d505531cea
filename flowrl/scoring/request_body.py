"""The body of a question to a reward server: read up to a limit, checked, taken apart."""

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from flowrl.scoring.protocol import Request, complaint

if TYPE_CHECKING:
    from starlette.datastructures import FormData
    from starlette.requests import Request as Asked

MAX_PARTS = 1000
MAX_UPLOADS = 8  # bodies that are read at a time; each is held in memory
UPLOADING = 120.0  # seconds that one may take


class Refused(Exception):
    """What the client did wrong, as an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None):
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after


class Uploads:
    """The bodies that are being read, of which there are few at a time."""

    def __init__(self):
        self._reading = 0

    async def read(self, asked: "Asked", max_body: int) -> tuple[Request, list[bytes]]:
        """As `read_request`; raises Refused also for one too many and one that takes too long."""
        if self._reading >= MAX_UPLOADS:
            raise Refused(503, f"{MAX_UPLOADS} uploads are being read; ask later", retry_after=1)
        self._reading += 1
        try:
            async with asyncio.timeout(UPLOADING):
                return await read_request(asked, max_body)
        except TimeoutError as error:
            raise Refused(408, f"the body did not end within {UPLOADING:g} s") from error
        finally:
            self._reading -= 1


async def read_request(asked: "Asked", max_body: int) -> tuple[Request, list[bytes]]:
    """The question and the bytes of its pictures, one for each item.

    Raises Refused for a body of more than max_body bytes or another form than the protocol's two.
    """
    kind = asked.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = _limited(asked, max_body)
    if kind == "application/json":
        request = _parse(b"".join([chunk async for chunk in body]))
        return request, [_unpacked(item.id, item.image) for item in request.items]
    if kind == "multipart/form-data":
        return await _read_parts(asked, body, max_body)
    raise Refused(
        415, f"got content of type {kind!r}; expected multipart/form-data or application/json"
    )


async def _limited(asked: "Asked", max_body: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for chunk in asked.stream():
        size += len(chunk)
        if size > max_body:
            raise Refused(
                413, f"the body is larger than {max_body} bytes; send fewer pictures at a time"
            )
        yield chunk


async def _read_parts(
    asked: "Asked", body: AsyncGenerator[bytes, None], max_body: int
) -> tuple[Request, list[bytes]]:
    from python_multipart.exceptions import FormParserError
    from starlette.formparsers import MultiPartException, MultiPartParser

    parser = MultiPartParser(
        asked.headers, body, max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=max_body
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError) as error:
        raise Refused(400, f"no readable multipart/form-data: {error}") from error
    try:
        return await _take_apart(form)
    finally:
        await form.close()


async def _take_apart(form: "FormData") -> tuple[Request, list[bytes]]:
    envelope, parts = form.get("request"), form.getlist("image")
    if envelope is None:
        raise Refused(422, "the form has no part named request")
    request = _parse(envelope if isinstance(envelope, str) else await envelope.read())
    if any(item.image is not None for item in request.items):
        raise Refused(422, "items.image is for the JSON form; send pictures as parts named image")
    if len(parts) != len(request.items):
        raise Refused(422, f"got {len(request.items)} items and {len(parts)} parts named image")
    blobs = [b"" if isinstance(part, str) else await part.read() for part in parts]
    if any(isinstance(part, str) for part in parts):
        raise Refused(422, "a part named image has no filename, which marks it as binary")
    return request, blobs


def _parse(text: str | bytes) -> Request:
    try:
        return Request.model_validate_json(text)
    except ValidationError as error:
        raise Refused(
            422, f"the request is not what the protocol asks for: {complaint(error)}"
        ) from (error)


def _unpacked(name: str, text: str | None) -> bytes:
    if text is None:
        raise Refused(422, f"item {name!r} has no image; expected base64 in the JSON form")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Refused(422, f"the image of item {name!r} is no base64: {error}") from error

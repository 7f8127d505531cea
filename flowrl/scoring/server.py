"""Serve rewards over HTTP, as docs/reward-servers.md specifies.

`/v1/info` and `/v1/score` check the token before they read anything else; `/healthz` needs none.
Scores are those of the same reward in process, since the same executors call it.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.check import trials_of
from flowrl.scoring.executors.base import Answer, Executor, InlineExecutor, Reward, RewardFailure
from flowrl.scoring.protocol import (
    LOSSLESS,
    MAX_PIXELS,
    PROTOCOL,
    TOKEN_RULE,
    Codec,
    Info,
    Item,
    Response,
    Result,
    RewardInfo,
    ScoreRequest,
    decode,
    error_message,
    is_sendable,
)
from flowrl.scoring.spec import RewardSpec

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import FormData
    from starlette.requests import Request


MAX_BODY = 64 * 2**20  # bytes
MAX_BATCH = 64  # images of a request
MAX_PARTS = 1000
MAX_UPLOADS = 8  # bodies that are read at a time; each is held in memory
UPLOAD_TIMEOUT_S = 120.0  # of one body
MAX_WAITING = 64  # requests at a time; further ones are refused with 503
REMEMBERED = 256  # answers kept for a client that repeats a request whose answer got lost
CLOSE_TIMEOUT_S = 20.0  # of all rewards; a pool may need 15

Rewards = Sequence[RewardSpec] | Mapping[str, Reward]


def make_app(
    rewards: Rewards,
    *,
    token: str | None = None,
    max_body: int = MAX_BODY,
    max_batch: int = MAX_BATCH,
    codecs: Sequence[Codec] = LOSSLESS,
) -> "FastAPI":
    """Return the ASGI application that serves `rewards`: specs, or callables by name.

    The application closes the executors of the specs when it ends; a spec without one gets a
    background thread. max_body: bytes of a request. Raises UserError without rewards, and for a
    token that no header can hold.
    """
    from fastapi import Depends, FastAPI, Request
    from starlette.responses import Response as Raw

    if token and not is_sendable(token):
        raise UserError(f"the server's token {TOKEN_RULE}")
    service = ScoringService(rewards, max_batch=max_batch, codecs=codecs)
    uploads = Uploads()

    async def authorised(asked: Request) -> None:
        given = asked.headers.get("authorization") or ""
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refused(401, "this server asks for its token, as Authorization: Bearer TOKEN")

    @asynccontextmanager
    async def life(_: FastAPI):
        yield
        await service.close()

    app = FastAPI(title="flowrl rewards", lifespan=life, openapi_url=None)
    app.state.service = service
    _answer_errors_in_json(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/v1/info", dependencies=[Depends(authorised)])
    async def info() -> Info:
        return service.info(max_body)

    @app.post("/v1/score", dependencies=[Depends(authorised)])
    async def score(asked: Request) -> Raw:
        request, blobs = await uploads.read(asked, max_body)
        answer = await service.answer(request, blobs)
        return Raw(answer.model_dump_json(), media_type="application/json")

    return app


def warm_up(spec: RewardSpec) -> bool:
    """Load a reward's model by scoring its first fixture, or plain images for an empty list.

    Returns False for a reward without `fixtures`, or that applies to no prompt tried: it loads at
    the first request. Raises UserError when an image gets no score.
    """
    if not hasattr(spec.reward, "fixtures") or spec.executor is None:
        return False
    trials = trials_of(spec, spec.reward, ())
    if not trials:
        return False
    first, count = trials[0], len(trials[0].images)
    asked = [first.prompt] * count, [dict(first.metadata) for _ in range(count)]
    answer = spec.executor.submit(first.images, *asked).result()
    for row, reason in answer.reasons.items():
        if first.says:
            raise UserError(f"reward {spec.name!r} cannot score its own fixture {row}: {reason}")
        if len(answer.reasons) == count:
            raise UserError(f"reward {spec.name!r} cannot score a plain image: {reason}")
    return True


class ScoringService:
    """The rewards of a server, their executors, and the latest answers."""

    def __init__(self, rewards: Rewards, *, max_batch: int, codecs: Sequence[Codec]):
        if isinstance(rewards, Mapping):
            rewards = [RewardSpec(name=name, reward=r) for name, r in rewards.items()]
        self.specs = {spec.name: spec for spec in rewards}
        if not rewards or len(self.specs) < len(rewards):
            raise UserError("a reward server needs rewards of different names")
        self.executors: dict[str, Executor] = {
            s.name: s.executor or InlineExecutor(s.reward, s.name, background=True) for s in rewards
        }
        self.not_closed: list[str] = []
        self._locks = {name: Lock() for name in self.specs}
        self.max_batch, self.codecs = max_batch, codecs
        self._jobs: OrderedDict[str, tuple[bytes, asyncio.Task[Response]]] = OrderedDict()

    def info(self, max_body: int) -> Info:
        return Info(
            protocol=PROTOCOL,
            rewards=[_describe(spec.name, spec.reward) for spec in self.specs.values()],
            codecs=list(self.codecs),
            forms=["multipart", "json"],
            max_batch=self.max_batch,
            max_body=max_body,
        )

    async def answer(self, request: ScoreRequest, blobs: list[bytes]) -> Response:
        """Score images once for every key: a repeated request waits for the first answer."""
        spec = self._check(request)
        digest = _digest(request, blobs)
        known, job = self._jobs.get(request.key, (digest, None))
        if known != digest:
            raise Refused(409, f"the key {request.key!r} was of another request; take a new one")
        if job is None:
            if sum(not task.done() for _, task in self._jobs.values()) >= MAX_WAITING:
                raise Refused(503, f"{MAX_WAITING} requests are waiting; ask later", retry_after=1)
            job = asyncio.ensure_future(self._score(spec, request, blobs))
            self._jobs[request.key] = (digest, job)
            job.add_done_callback(lambda done: self._forget(request.key, done))
        return await asyncio.shield(job)

    async def close(self) -> None:
        """End all rewards; `not_closed` names those that do not end in time."""
        # Not asyncio's threads: a process that ends would wait for them without limit.
        ends = {n: Thread(target=e.close, daemon=True) for n, e in self.executors.items()}
        for thread in ends.values():
            thread.start()
        limit = time.monotonic() + CLOSE_TIMEOUT_S
        while any(t.is_alive() for t in ends.values()) and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        self.not_closed = [name for name, thread in ends.items() if thread.is_alive()]

    def _check(self, request: ScoreRequest) -> RewardSpec:
        spec = self.specs.get(request.reward)
        if spec is None:
            known = ", ".join(self.specs)
            raise Refused(404, f"there is no reward {request.reward!r} here; there is {known}")
        count = len(request.items)
        if count > self.max_batch:
            raise Refused(413, f"{count} items in one request; at most {self.max_batch} are taken")
        if request.codec not in self.codecs:
            known = ", ".join(self.codecs)
            raise Refused(422, f"codec {request.codec!r} is not accepted here; use one of {known}")
        if spec.whole_groups and (count < 2 or len({item.prompt for item in request.items}) > 1):
            raise Refused(
                422, f"reward {spec.name!r} compares groups: send 2 or more images of one prompt"
            )
        return spec

    async def _score(self, spec: RewardSpec, request: ScoreRequest, blobs: list[bytes]) -> Response:
        try:
            images = await asyncio.to_thread(_images, request, blobs)
        except ValueError as error:
            raise Refused(422, str(error)) from error
        count, scores = len(request.items), dict[int, float]()
        components: dict[int, dict[str, float | None]] = {}
        why = await asyncio.to_thread(self._misfits, spec, request.items)
        if spec.whole_groups and 0 in why:
            why = dict.fromkeys(range(count), why[0])
        rows = [row for row in range(count) if row not in why]
        if rows:
            answer = await self._ask(spec, images[rows], [request.items[row] for row in rows])
            scores = dict(zip(rows, answer.scores.tolist(), strict=True))
            why |= {rows[row]: text for row, text in answer.reasons.items()}
            named = {name: part.scores.tolist() for name, part in answer.components.items()}
            components = {r: {n: s[i] for n, s in named.items()} for i, r in enumerate(rows)}
        return Response(
            protocol=PROTOCOL,
            reward=spec.name,
            version=_version(spec.reward),
            key=request.key,
            results=[
                Result(
                    id=item.id,
                    score=scores.get(row),
                    error=why.get(row),
                    components=components.get(row, {}),
                )
                for row, item in enumerate(request.items)
            ],
        )

    def _misfits(self, spec: RewardSpec, items: Sequence[Item]) -> dict[int, str]:
        """Return by row why the reward cannot score an item; may read files, which takes time."""
        with self._locks[spec.name]:
            reasons = [_misfit(spec, item) for item in items]
        return {row: text for row, text in enumerate(reasons) if text is not None}

    async def _ask(self, spec: RewardSpec, images: Tensor, items: list[Item]) -> Answer:
        prompts, metadata = [item.prompt for item in items], [item.metadata for item in items]

        def submit():
            with self._locks[spec.name]:  # an executor that works at once must work alone
                return self.executors[spec.name].submit(images, prompts, metadata)

        try:
            return await asyncio.wrap_future(await asyncio.to_thread(submit))
        except RewardFailure as error:  # no further try would mend it: 4xx, not 5xx
            raise Refused(424, str(error)) from error

    def _forget(self, key: str, done: "asyncio.Task[Response]") -> None:
        """Forget failures, and all answers but the latest."""
        if done.cancelled() or done.exception():
            self._jobs.pop(key, None)
        finished = [key for key, (_, task) in self._jobs.items() if task.done()]
        for old in finished[: max(0, len(finished) - REMEMBERED)]:
            del self._jobs[old]


def _misfit(spec: RewardSpec, item: Item) -> str | None:
    """Return why a reward cannot score an item; None if it can."""
    needed = getattr(spec.reward, "required_metadata", ())
    if missing := [key for key in needed if key not in item.metadata]:
        return f"the metadata lack {', '.join(missing)}"
    try:
        if not spec.applies(item.prompt, item.metadata):
            return (
                "the reward does not apply to this prompt: name the prompts it is for with "
                "applies_to in the recipe"
            )
        getattr(spec.reward, "check", lambda *_: None)(item.prompt, item.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _images(request: ScoreRequest, blobs: list[bytes]) -> Tensor:
    """Return images (B, 3, H, W) float32 in [0, 1]. Raises ValueError naming the bad one."""
    images: list[np.ndarray] = []
    left = MAX_PIXELS
    for item, blob in zip(request.items, blobs, strict=True):
        try:
            image = decode(blob, request.codec, max_pixels=left)
        except ValueError as error:
            raise ValueError(f"the image of item {item.id!r} {error}") from error
        if images and image.shape != images[0].shape:
            sizes = f"{images[0].shape[:2]} and {image.shape[:2]}"
            raise ValueError(f"images of sizes {sizes} in one request; send one size at a time")
        left -= image.shape[0] * image.shape[1]
        images.append(image)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def _digest(request: ScoreRequest, blobs: list[bytes]) -> bytes:
    text = request.model_dump_json(exclude={"items": {"__all__": {"image"}}}).encode()
    hashes = b"".join(hashlib.sha256(blob).digest() for blob in blobs)
    return hashlib.sha256(text + hashes).digest()


def _describe(name: str, reward: Reward) -> RewardInfo:
    return RewardInfo(
        name=name,
        version=_version(reward),
        scope=getattr(reward, "scope", "sample"),
        bounds=getattr(reward, "bounds", None) or (None, None),
        required_metadata=list(getattr(reward, "required_metadata", ())),
        deterministic=bool(getattr(reward, "deterministic", True)),
        components=list(getattr(reward, "components", ())),
    )


def _version(reward: Reward) -> str:
    return str(getattr(reward, "version", None) or "")


class Refused(Exception):
    """A refusal of a request, as an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None):
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after


class Uploads:
    """Reads request bodies, at most `MAX_UPLOADS` at a time."""

    def __init__(self):
        self._places = asyncio.Semaphore(MAX_UPLOADS)

    async def read(self, asked: "Request", max_body: int) -> tuple[ScoreRequest, list[bytes]]:
        """Read a request; raises Refused also for one too many and one that takes too long."""
        if self._places.locked():
            raise Refused(503, f"{MAX_UPLOADS} uploads are being read; ask later", retry_after=1)
        try:
            async with self._places, asyncio.timeout(UPLOAD_TIMEOUT_S):
                return await read_request(asked, max_body)
        except TimeoutError as error:
            raise Refused(408, f"the body did not end within {UPLOAD_TIMEOUT_S:g} s") from error


async def read_request(asked: "Request", max_body: int) -> tuple[ScoreRequest, list[bytes]]:
    """Return the request and the bytes of each item's image.

    Raises Refused for a body of more than max_body bytes or another form than the protocol's two.
    """
    kind = asked.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = _limited(asked, max_body)
    if kind == "application/json":
        request = _parse(b"".join([chunk async for chunk in body]))
        return request, [_decode_base64(item.id, item.image) for item in request.items]
    if kind == "multipart/form-data":
        return await _read_parts(asked, body, max_body)
    raise Refused(
        415, f"got content of type {kind!r}; expected multipart/form-data or application/json"
    )


async def _limited(asked: "Request", max_body: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for chunk in asked.stream():
        size += len(chunk)
        if size > max_body:
            raise Refused(413, f"the body is larger than {max_body} bytes; send fewer images")
        yield chunk


async def _read_parts(
    asked: "Request", body: AsyncGenerator[bytes, None], max_body: int
) -> tuple[ScoreRequest, list[bytes]]:
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
        return await _read_form(form)
    finally:
        await form.close()


async def _read_form(form: "FormData") -> tuple[ScoreRequest, list[bytes]]:
    envelope, parts = form.get("request"), form.getlist("image")
    if envelope is None:
        raise Refused(422, "the form has no part named request")
    request = _parse(envelope if isinstance(envelope, str) else await envelope.read())
    if any(item.image is not None for item in request.items):
        raise Refused(422, "items.image is for the JSON form; send images as parts named image")
    if len(parts) != len(request.items):
        raise Refused(422, f"got {len(request.items)} items and {len(parts)} parts named image")
    blobs = [b"" if isinstance(part, str) else await part.read() for part in parts]
    if any(isinstance(part, str) for part in parts):
        raise Refused(422, "a part named image has no filename, which marks it as binary")
    return request, blobs


def _parse(text: str | bytes) -> ScoreRequest:
    try:
        return ScoreRequest.model_validate_json(text)
    except ValidationError as error:
        raise Refused(422, f"the request breaks the protocol: {error_message(error)}") from error


def _decode_base64(name: str, text: str | None) -> bytes:
    if text is None:
        raise Refused(422, f"item {name!r} has no image; expected base64 in the JSON form")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Refused(422, f"the image of item {name!r} is no base64: {error}") from error


def _answer_errors_in_json(app: "FastAPI") -> None:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    async def refused(_: Any, error: Any) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return JSONResponse({"error": str(error)}, error.status, headers=headers)

    async def unknown(_: Any, error: Any) -> JSONResponse:
        text = f"{error.detail}: there is GET /healthz, GET /v1/info and POST /v1/score"
        return JSONResponse({"error": text}, error.status_code)

    async def unexpected(_: Any, error: Any) -> JSONResponse:
        text = f"{type(error).__name__} in the server; its log says where"
        return JSONResponse({"error": text}, 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, unexpected)

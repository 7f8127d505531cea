"""Serve rewards over HTTP, as docs/reward-servers.md specifies.

`/v1/info` and `/v1/score` check the token before they read anything else; `/healthz` needs none.
Scores are those of the same reward in process, since the same executors call it.

Images wait as the bytes that came, all of them together within a budget, and are decoded when it is
their turn; clients take turns. What a client asked and did not stay for is dropped.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.admission import ByteBudget, Pace, Turns
from flowrl.scoring.check import trials_of
from flowrl.scoring.executors.base import (
    Answer,
    Executor,
    InlineExecutor,
    Reward,
    RewardFailure,
    joined,
)
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
MAX_PENDING = 256 * 2**20  # bytes of all bodies that are read or wait
MAX_UPLOADS = 32  # bodies that are read at a time
UPLOAD_WAIT_S = 60.0  # for room and a place to read, then a client is told to come back
UPLOAD_GRACE_S, UPLOAD_RATE = 10.0, 256 * 2**10  # seconds, and then bytes a second of a body
MAX_WAITING = 1024  # requests at a time; further ones are refused with 503
CHUNK_PIXELS = 2**21  # images of one size are given to a reward in calls of about so many pixels
REMEMBERED = 256  # answers kept for a client that repeats a request whose answer got lost
CLOSE_TIMEOUT_S = 20.0  # of all rewards; a pool may need 15

Rewards = Sequence[RewardSpec] | Mapping[str, Reward]


def make_app(
    rewards: Rewards,
    *,
    token: str | None = None,
    max_body: int = MAX_BODY,
    max_batch: int = MAX_BATCH,
    max_pixels: int = MAX_PIXELS,
    max_pending_bytes: int = MAX_PENDING,
    batch_wait: float = 0.0,
    codecs: Sequence[Codec] = LOSSLESS,
) -> "FastAPI":
    """Return the ASGI application that serves `rewards`: specs, or callables by name.

    The application closes the executors of the specs when it ends; a spec without one gets a
    background thread.

    Args:
        max_body: bytes of a request.
        max_pixels: of all images of a request together.
        max_pending_bytes: of all requests that are read or wait; further ones wait to be read.
        batch_wait: seconds that a request waits for others to be scored in one call with it.

    Raises:
        UserError: without rewards, and for a token that no header can hold.
    """
    from fastapi import Depends, FastAPI, Request
    from starlette.responses import Response as Raw

    if token and not is_sendable(token):
        raise UserError(f"the server's token {TOKEN_RULE}")
    service = ScoringService(
        rewards, max_batch=max_batch, codecs=codecs, max_pixels=max_pixels, batch_wait=batch_wait
    )
    uploads = Uploads(max_pending_bytes)

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
        async with uploads.read(asked, max_body) as (request, blobs):
            answer = await while_connected(asked, service.answer(request, blobs, client_of(asked)))
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


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A request that waits for its turn, or is scored."""

    spec: RewardSpec
    request: ScoreRequest
    blobs: list[bytes]  # emptied when they are decoded
    digest: bytes
    client: str
    done: "asyncio.Future[Response]"
    listeners: int = 0  # clients that stayed for the answer


class ScoringService:
    """The rewards of a server, their executors, and the latest answers."""

    def __init__(
        self,
        rewards: Rewards,
        *,
        max_batch: int,
        codecs: Sequence[Codec],
        max_pixels: int = MAX_PIXELS,
        batch_wait: float = 0.0,
    ):
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
        self.max_pixels, self.batch_wait = max_pixels, batch_wait
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._turns: dict[str, Turns[Job]] = {}
        self._lanes: list[asyncio.Task[None]] = []

    def info(self, max_body: int) -> Info:
        return Info(
            protocol=PROTOCOL,
            rewards=[_describe(spec.name, spec.reward) for spec in self.specs.values()],
            codecs=list(self.codecs),
            forms=["multipart", "json"],
            max_batch=self.max_batch,
            max_body=max_body,
            max_pixels=self.max_pixels,
        )

    async def answer(self, request: ScoreRequest, blobs: list[bytes], client: str = "") -> Response:
        """Score images once for every key: a repeated request waits for the first answer.

        Clients take turns. A request whose clients have all left is dropped while it waits.
        """
        spec = self._check(request)
        digest = _digest(request, blobs)
        job = self._jobs.get(request.key)
        if job is not None and job.digest != digest:
            raise Refused(409, f"the key {request.key!r} was of another request; take a new one")
        if job is None:
            if sum(not other.done.done() for other in self._jobs.values()) >= MAX_WAITING:
                raise Refused(503, f"{MAX_WAITING} requests are waiting; ask later", retry_after=1)
            done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
            job = self._jobs[request.key] = Job(
                spec=spec, request=request, blobs=blobs, digest=digest, client=client, done=done
            )
            done.add_done_callback(lambda done: self._forget(request.key, done))
            self._queue(spec).put(client, job)
        job.listeners += 1
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            job.listeners -= 1
            if not job.listeners and not job.done.done():
                self._turns[spec.name].drop(client, job)
                job.blobs = []
                job.done.cancel()
            raise

    def _queue(self, spec: RewardSpec) -> "Turns[Job]":
        """Return a reward's queue, with those who serve it: one more than it can score at a time,
        so that images are decoded meanwhile."""
        if spec.name not in self._turns:
            self._turns[spec.name] = Turns()
            count = 1 + getattr(self.executors[spec.name], "workers", 1)
            self._lanes += [asyncio.create_task(self._serve(spec)) for _ in range(count)]
        return self._turns[spec.name]

    async def _serve(self, spec: RewardSpec) -> None:
        while True:
            jobs = [await self._turns[spec.name].get()]
            if self.batch_wait and not spec.whole_groups:
                await self._gather(spec, jobs)
            try:
                answers = await self._score(spec, jobs)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                answers = [error] * len(jobs)
            for job, answer in zip(jobs, answers, strict=True):
                if job.done.done():  # nobody stayed
                    continue
                if isinstance(answer, Exception):
                    job.done.set_exception(answer)
                else:
                    job.done.set_result(answer)

    async def _gather(self, spec: RewardSpec, jobs: list[Job]) -> None:
        """Wait for others to be scored together with the first, up to `max_batch` images."""
        ends = time.monotonic() + self.batch_wait
        count = len(jobs[0].request.items)
        while count < self.max_batch:
            if (job := self._turns[spec.name].get_now()) is not None:
                jobs.append(job)
                count += len(job.request.items)
            elif time.monotonic() >= ends:
                break
            else:
                await asyncio.sleep(min(0.002, self.batch_wait))

    async def close(self) -> None:
        """End all rewards; `not_closed` names those that do not end in time."""
        # Not asyncio's threads: a process that ends would wait for them without limit.
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for job in self._jobs.values():
            if not job.done.done():
                job.done.set_exception(Refused(503, "this server ends", retry_after=1))
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

    async def _score(self, spec: RewardSpec, jobs: list[Job]) -> "list[Response | Exception]":
        """Return the answer to each job, or why there is none; jobs with images of one size share
        calls of the reward."""
        found: dict[Job, Response | Exception] = {}
        ready: dict[tuple[int, ...], list[tuple[Job, Tensor, dict[int, str]]]] = {}
        for job in jobs:
            try:
                levels = await asyncio.to_thread(_images, job.request, job.blobs, self.max_pixels)
            except ValueError as error:
                found[job] = Refused(422, str(error))
                continue
            job.blobs = []
            why = await asyncio.to_thread(self._misfits, spec, job.request.items)
            if spec.whole_groups and 0 in why:
                why = dict.fromkeys(range(len(job.request.items)), why[0])
            ready.setdefault(tuple(levels.shape[1:]), []).append((job, levels, why))
        for together in ready.values():
            try:
                found |= await self._score_together(spec, together)
            except Refused as error:
                found |= {job: error for job, _, _ in together}
        return [found[job] for job in jobs]

    async def _score_together(
        self, spec: RewardSpec, asked: "list[tuple[Job, Tensor, dict[int, str]]]"
    ) -> "dict[Job, Response]":
        places = [(job, row) for job, levels, why in asked for row in range(len(levels))
                  if row not in why]  # fmt: skip
        answer: Answer | None = None
        if places:
            rows = [levels[[row for row in range(len(levels)) if row not in why]]
                    for _, levels, why in asked]  # fmt: skip
            items = [job.request.items[row] for job, row in places]
            answer = await self._ask(spec, torch.cat(rows), items)
        found = {}
        for job, _, why in asked:
            own = {row: i for i, (other, row) in enumerate(places) if other is job}
            found[job] = _response(spec, job.request, own, answer, why)
        return found

    def _misfits(self, spec: RewardSpec, items: Sequence[Item]) -> dict[int, str]:
        """Return by row why the reward cannot score an item; may read files, which takes time."""
        with self._locks[spec.name]:
            reasons = [_misfit(spec, item) for item in items]
        return {row: text for row, text in enumerate(reasons) if text is not None}

    async def _ask(self, spec: RewardSpec, levels: Tensor, items: list[Item]) -> Answer:
        """Ask a reward of images (B, 3, H, W) uint8; floats of a part of them exist at a time."""
        prompts, metadata = [item.prompt for item in items], [item.metadata for item in items]
        pixels = levels.shape[-1] * levels.shape[-2]
        size = len(levels) if spec.whole_groups else max(1, CHUNK_PIXELS // pixels)

        def submit(rows: slice) -> "Future[Answer]":
            images = levels[rows].float().div_(255)
            with self._locks[spec.name]:  # an executor that works at once must work alone
                return self.executors[spec.name].submit(images, prompts[rows], metadata[rows])

        parts: list[Answer] = []
        try:
            for start in range(0, len(levels), size):
                future = await asyncio.to_thread(submit, slice(start, start + size))
                parts.append(await asyncio.wrap_future(future))
        except RewardFailure as error:  # no further try would mend it: 4xx, not 5xx
            raise Refused(424, str(error)) from error
        return joined(parts, 0.0)

    def _forget(self, key: str, done: "asyncio.Future[Response]") -> None:
        """Forget failures, and all answers but the latest."""
        if done.cancelled() or done.exception():
            self._jobs.pop(key, None)
        finished = [key for key, job in self._jobs.items() if job.done.done()]
        for old in finished[: max(0, len(finished) - REMEMBERED)]:
            del self._jobs[old]


def _response(
    spec: RewardSpec, request: ScoreRequest, own: Mapping[int, int], answer: Answer | None,
    why: Mapping[int, str],
) -> Response:  # fmt: skip
    """Return a request's part of an answer; own: the place there of each row that was asked."""
    results = []
    for row, item in enumerate(request.items):
        at, reason = own.get(row), why.get(row)
        score, components = None, {}
        if at is not None and answer is not None:
            score, reason = answer.scores[at].item(), answer.reasons.get(at)
            components = {n: part.scores[at].item() for n, part in answer.components.items()}
        results.append(Result(id=item.id, score=score, error=reason, components=components))
    return Response(
        protocol=PROTOCOL,
        reward=spec.name,
        version=_version(spec.reward),
        key=request.key,
        results=results,
    )


def client_of(asked: "Request") -> str:
    """Return who asks: what it calls itself, or its address."""
    return asked.headers.get("x-client") or (asked.client.host if asked.client else "")


async def while_connected(asked: "Request", answer: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer; drop the work when the client leaves before."""

    async def left() -> None:
        while (await asked.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(answer), asyncio.create_task(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refused(499, "the client has left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


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


def _images(request: ScoreRequest, blobs: list[bytes], max_pixels: int) -> Tensor:
    """Return images (B, 3, H, W) uint8. Raises ValueError naming the bad one."""
    images: list[np.ndarray] = []
    left = max_pixels
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
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


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
    """Reads request bodies, some at a time and within a budget of bytes; others wait."""

    def __init__(self, max_pending_bytes: int = MAX_PENDING):
        self.budget = ByteBudget(max_pending_bytes)
        self._places = asyncio.Semaphore(MAX_UPLOADS)

    @asynccontextmanager
    async def read(
        self, asked: "Request", max_body: int
    ) -> AsyncIterator[tuple[ScoreRequest, list[bytes]]]:
        """Hold a request in memory inside.

        Raises Refused for one that is too slow or too large, or waits too long for room.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(UPLOAD_WAIT_S):
                    await stack.enter_async_context(
                        self.budget.holding(_announced(asked, max_body))
                    )
                    await self._places.acquire()
            except TimeoutError as error:
                raise Refused(503, "other uploads are read; ask later", retry_after=1) from error
            try:
                held = await read_request(asked, max_body)
            finally:
                self._places.release()
            yield held


def _announced(asked: "Request", max_body: int) -> int:
    """Return how many bytes a body says that it has. Raises Refused for too many."""
    size = asked.headers.get("content-length", "")
    size = int(size) if size.isdecimal() else max_body
    if size > max_body:
        raise Refused(413, f"the body is larger than {max_body} bytes; send fewer images")
    return size


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
    size, pace, stream = 0, Pace(UPLOAD_GRACE_S, UPLOAD_RATE), asked.stream()
    while True:
        try:
            async with asyncio.timeout(pace.left(size)):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise Refused(
                408, f"after {UPLOAD_GRACE_S:g} s a body comes with {UPLOAD_RATE // 1024} KiB a "
                f"second or more, and of this one {size} bytes came"
            ) from error  # fmt: skip
        if chunk is None:
            return
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
    parser.spool_max_size = max_body  # in memory, within the budget, never in temporary files
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

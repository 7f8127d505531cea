"""Serve rewards over HTTP, as docs/reward-servers.md specifies.

Scores are those of the same reward in process, since the same executors compute them. A request
waits as the JSON that arrived and is decoded when its reward is free. Bodies are read of so many
requests at a time, until they are answered; others wait. Addresses, tokens, origins and connections
are guarded by `utils.serving`.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.responses import Response as RawResponse
from starlette.routing import Route
from torch import Tensor

from flowrl.config.rewards import InlineOptions
from flowrl.errors import UserError
from flowrl.scoring.check import check_reward, trials_of
from flowrl.scoring.executors.base import (
    Answer,
    InlineExecutor,
    Reward,
    RewardFailure,
    failed,
)
from flowrl.scoring.protocol import (
    PROTOCOL,
    Info,
    Item,
    Response,
    Result,
    RewardInfo,
    ScoreRequest,
    decode,
    error_message,
)
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.serving import Access, Guard

MAX_BODY = 80 * 2**20  # bytes of a request: 16 images of 1024 x 1024 as pixels
MAX_BATCH = 256  # images of a request
BYTES_PER_PIXEL = 5  # of a body: 3 in base64 are 4, and there are prompts and metadata
BODIES_AT_ONCE = 8  # requests that are held together
BODY_TIMEOUT_S = 60.0  # until a body has arrived
REMEMBERED = 256  # answers, for clients that repeat a request whose answer was lost


class Refused(Exception):
    """A refusal of a request, as an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


def background_spec(name: str, reward: Reward) -> RewardSpec:
    """Return a reward in a thread of this process, as `make_app` serves it."""
    executor = InlineExecutor(reward, name, InlineOptions(background=True))
    return RewardSpec(name=name, reward=reward, executor=executor)


def make_app(
    specs: Sequence[RewardSpec], *, hosts: Collection[str] | None = None, token: str | None = None,
    max_body: int = MAX_BODY,
) -> Starlette:  # fmt: skip
    """Return the ASGI application that serves rewards in background threads.

    It closes their executors when it ends.

    Args:
        hosts: names that clients may send as Host; None for any, which needs a token.
        token: that clients must send; None where only this machine reaches the server.
        max_body: bytes of a request.

    Raises:
        UserError: without rewards.
    """
    service, bodies = ScoringService(specs, max_body), asyncio.Semaphore(BODIES_AT_ONCE)

    async def health(request: Request) -> RawResponse:
        return JSONResponse({"status": "ready"})

    async def info(request: Request) -> RawResponse:
        return RawResponse(service.info().model_dump_json(), media_type="application/json")

    async def score(request: Request) -> RawResponse:
        async with bodies:
            response = await service.answer(*await read_request(request))
        return RawResponse(response.model_dump_json(), media_type="application/json")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    access = Access(
        server="flowrl reward-serve", hosts=None if hosts is None else frozenset(hosts),
        token=token, private="/v1", max_body=max_body,
    )  # fmt: skip
    return Starlette(
        routes=[
            Route("/healthz", health), Route("/v1/info", info),
            Route("/v1/score", score, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, access=access)],
        exception_handlers={Refused: _refuse},
        lifespan=lifespan,
    )  # fmt: skip


async def _refuse(request: Request, error: Any) -> RawResponse:
    return JSONResponse({"error": str(error)}, error.status)


async def read_request(request: Request) -> tuple[ScoreRequest, bytes]:
    """Return a request's message and a digest of its body. Raises Refused for another body."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.body()
        message = await asyncio.to_thread(ScoreRequest.model_validate_json, body)
    except TimeoutError as error:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise Refused(408, text) from error
    except ClientDisconnect as error:
        raise Refused(400, "the client left before its body was complete") from error
    except ValidationError as error:
        raise Refused(422, f"the request breaks the protocol: {error_message(error)}") from error
    return message, hashlib.sha256(body).digest()


def warm_up(spec: RewardSpec) -> bool:
    """Load a reward's model by checking it, as training does before its first step.

    Returns False if the reward has no `fixtures` or applies to no prompt tried: the first request
    then loads it. Raises UserError when it does not work.
    """
    if not hasattr(spec.reward, "fixtures") or not trials_of(spec, ()):
        return False
    result = check_reward(spec)
    if result.state in ("missing", "problem"):
        raise UserError(f"reward {spec.name!r}: {result.detail}. {result.remedy}")
    return True


# --- scoring --------------------------------------------------------------------------------------


class ScoringService:
    """The rewards of a server, their executors, and the latest answers."""

    def __init__(self, specs: Sequence[RewardSpec], max_body: int):
        self.specs = {spec.name: spec for spec in specs}
        if not specs or len(self.specs) < len(specs):
            raise UserError("a reward server needs rewards of different names")
        self.max_pixels = max(1, max_body // BYTES_PER_PIXEL)
        # One request more than a reward can score at a time, so that images are decoded meanwhile.
        self._turns = {name: asyncio.Semaphore(2) for name in self.specs}
        self._locks = {name: Lock() for name in self.specs}  # user code runs in one thread
        self._tasks: dict[bytes, asyncio.Task[Response]] = {}  # by digest of the request
        self._answers: OrderedDict[bytes, Response] = OrderedDict()

    def info(self) -> Info:
        return Info(
            protocol=PROTOCOL,
            rewards=[_describe(spec.name, spec.reward) for spec in self.specs.values()],
            max_batch=MAX_BATCH,
            max_pixels=self.max_pixels,
        )

    async def answer(self, request: ScoreRequest, digest: bytes) -> Response:
        """Score a request once: a repeated one gets the answer that exists, or waits for it."""
        if digest in self._answers:
            return self._answers[digest]
        if digest not in self._tasks:
            spec = self._find_reward(request)
            task = self._tasks[digest] = asyncio.create_task(self._score(spec, request))
            task.add_done_callback(lambda task: self._remember(digest, task))
        # A client that leaves does not end the work: it will retry and want the answer.
        return await asyncio.shield(self._tasks[digest])

    def _remember(self, digest: bytes, task: "asyncio.Task[Response]") -> None:
        """Keep the answer and nothing of the request; failures are forgotten."""
        del self._tasks[digest]
        if not task.cancelled() and task.exception() is None:
            self._answers[digest] = task.result()
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for spec in self.specs.values():
            await asyncio.to_thread(spec.close)

    def _find_reward(self, request: ScoreRequest) -> RewardSpec:
        spec, count = self.specs.get(request.reward), len(request.items)
        if spec is None:
            names = ", ".join(self.specs)
            raise Refused(404, f"no reward {request.reward!r} is served here, but {names}")
        if count > MAX_BATCH:
            raise Refused(413, f"{count} items in one request; at most {MAX_BATCH} are taken")
        if spec.whole_groups and (count < 2 or len({item.prompt for item in request.items}) > 1):
            raise Refused(
                422, f"reward {spec.name!r} compares groups: send 2 or more images of one prompt"
            )
        return spec

    async def _score(self, spec: RewardSpec, request: ScoreRequest) -> Response:
        async with self._turns[spec.name]:
            try:
                levels = await asyncio.to_thread(decode_images, request, self.max_pixels)
            except ValueError as error:
                raise Refused(422, str(error)) from error
            misfits = await asyncio.to_thread(self._misfits, spec, request.items)
            if spec.whole_groups and 0 in misfits:
                misfits = dict.fromkeys(range(len(request.items)), misfits[0])
            rows = [row for row in range(len(request.items)) if row not in misfits]
            items = [request.items[row] for row in rows]
            answer = await self._ask(spec, levels[rows], items) if rows else failed(0, "")
        scores = dict(zip(rows, answer.scores.tolist(), strict=True))
        reasons = misfits | {rows[place]: reason for place, reason in answer.reasons.items()}
        return Response(
            protocol=PROTOCOL,
            reward=spec.name,
            version=_version(spec.reward),
            key=request.key,
            results=[
                Result(id=item.id, score=scores.get(row), error=reasons.get(row))
                for row, item in enumerate(request.items)
            ],
        )

    def _misfits(self, spec: RewardSpec, items: Sequence[Item]) -> dict[int, str]:
        """Return by row why the reward cannot score an item; may read files, which takes time."""
        with self._locks[spec.name]:
            reasons = [spec.misfit(item.prompt, item.metadata) for item in items]
        return {row: text for row, text in enumerate(reasons) if text is not None}

    async def _ask(self, spec: RewardSpec, levels: Tensor, items: list[Item]) -> Answer:
        """Score images (B, 3, H, W) uint8."""
        prompts, metadata = [item.prompt for item in items], [item.metadata for item in items]

        def submit() -> "Future[Answer]":
            images = levels.float().div_(255)
            with self._locks[spec.name]:
                return spec.get_executor().submit(images, prompts, metadata)

        try:
            return await asyncio.wrap_future(await asyncio.to_thread(submit))
        except RewardFailure as error:  # no retry would mend it: 4xx, not 5xx
            raise Refused(424, str(error)) from error


def decode_images(request: ScoreRequest, max_pixels: int) -> Tensor:
    """Return images (B, 3, H, W) uint8. Raises ValueError that names the bad one."""
    images: list[np.ndarray] = []
    for item in request.items:
        try:
            image = decode(item.image, max_pixels=max_pixels)
        except ValueError as error:
            raise ValueError(f"the image of item {item.id!r} {error}") from error
        if images and image.shape != images[0].shape:
            sizes = f"{images[0].shape[:2]} and {image.shape[:2]}"
            raise ValueError(f"images of sizes {sizes} in one request; send one size at a time")
        max_pixels -= image.shape[0] * image.shape[1]
        images.append(image)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _describe(name: str, reward: Reward) -> RewardInfo:
    said = {field: getattr(reward, field, None) for field in RewardInfo.model_fields}
    said = {field: value for field, value in said.items() if value is not None}
    return RewardInfo.model_validate(said | {"name": name, "version": _version(reward)})


def _version(reward: Reward) -> str:
    return str(getattr(reward, "version", None) or "")

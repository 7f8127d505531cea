"""Rewards behind HTTP: the remote end of `scoring.executors.http`. See docs/reward-servers.md.

A score is the same number as in process, since the same executors ask the reward.
"""

from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from flowrl.scoring.executors.base import Reward
from flowrl.scoring.protocol import LOSSLESS, PROTOCOL, Codec, Info, RewardInfo
from flowrl.scoring.request_body import Refused, Uploads
from flowrl.scoring.service import Rewards, Service, version_of

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_BODY = 64 * 2**20
MAX_BATCH = 64


def make_app(
    rewards: Rewards,
    *,
    token: str | None = None,
    max_body: int = MAX_BODY,
    max_batch: int = MAX_BATCH,
    codecs: Sequence[Codec] = LOSSLESS,
) -> "FastAPI":
    """The ASGI application that serves `rewards`: specs, or callables by name.

    A spec's executor asks its reward, by default one thread of its own; the application closes it
    when it ends. max_body: bytes of a request. Raises UserError without rewards, and for a token
    that no header can hold.
    """
    from fastapi import FastAPI
    from fastapi import Request as Asked
    from starlette.responses import Response as Raw

    service = Service(rewards, token=token, max_batch=max_batch, codecs=codecs)

    @asynccontextmanager
    async def life(_: FastAPI):
        yield
        await service.close()

    app = FastAPI(title="flowrl rewards", lifespan=life, openapi_url=None)
    app.state.service, uploads = service, Uploads()
    _answer_errors_in_json(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/v1/info")
    async def info(asked: Asked) -> Info:
        service.check_token(asked.headers.get("authorization"))
        return Info(
            protocol=PROTOCOL,
            rewards=[describe(spec.name, spec.reward) for spec in service.specs.values()],
            codecs=list(service.codecs),
            forms=["multipart", "json"],
            max_batch=service.max_batch,
            max_body=max_body,
        )

    @app.post("/v1/score")
    async def score(asked: Asked) -> Raw:
        service.check_token(asked.headers.get("authorization"))
        request, blobs = await uploads.read(asked, max_body)
        answer = await service.answer(request, blobs)
        return Raw(answer.model_dump_json(), media_type="application/json")

    return app


def describe(name: str, reward: Reward) -> RewardInfo:
    """What a reward says of itself, for /v1/info."""
    low, high = getattr(reward, "bounds", None) or (None, None)
    return RewardInfo(
        name=name,
        version=version_of(reward),
        scope=getattr(reward, "scope", "sample"),
        bounds=(low, high),
        required_metadata=list(getattr(reward, "required_metadata", ())),
        deterministic=bool(getattr(reward, "deterministic", True)),
    )


def _answer_errors_in_json(app: "FastAPI") -> None:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    async def refused(_: Any, error: Any) -> JSONResponse:
        later = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return JSONResponse({"error": str(error)}, error.status, headers=later)

    async def unknown(_: Any, error: Any) -> JSONResponse:
        text = f"{error.detail}: there is GET /healthz, GET /v1/info and POST /v1/score"
        return JSONResponse({"error": text}, error.status_code)

    async def unexpected(_: Any, error: Any) -> JSONResponse:
        text = f"{type(error).__name__} in the server; its log says where"
        return JSONResponse({"error": text}, 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, unexpected)

"""A reward server without its HTTP: questions in, scores out, each asked once."""

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock, Thread

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.executors.base import Answer, Executor, Reward, RewardFailure
from flowrl.scoring.executors.inline import Inline
from flowrl.scoring.protocol import (
    MAX_PIXELS,
    PROTOCOL,
    TOKEN_RULE,
    Codec,
    Item,
    Request,
    Response,
    Result,
    decode,
    sendable,
)
from flowrl.scoring.request_body import Refused
from flowrl.scoring.spec import RewardSpec

MAX_WAITING = 64  # questions at a time; further ones are told to come back
REMEMBERED = 256  # answers kept for a client that asks again because the first one got lost
CLOSING = 20.0  # seconds that rewards get to end; a pool may need 15

Rewards = Sequence[RewardSpec] | Mapping[str, Reward]


class Service:
    """What the server knows: the rewards, who asks them, and the answers of late."""

    def __init__(
        self, rewards: Rewards, *, token: str | None, max_batch: int, codecs: Sequence[Codec]
    ):
        if isinstance(rewards, Mapping):
            rewards = [RewardSpec(name=name, reward=r) for name, r in rewards.items()]
        if token and not sendable(token):
            raise UserError(f"the server's token {TOKEN_RULE}")
        self.specs = {spec.name: spec for spec in rewards}
        if not rewards or len(self.specs) < len(rewards):
            raise UserError("a reward server needs rewards of different names")
        self.executors: dict[str, Executor] = {
            s.name: s.executor or Inline(s.reward, s.name, background=True) for s in rewards
        }
        self.hangs: list[str] = []
        self._turns = {name: Lock() for name in self.specs}
        self.token, self.max_batch, self.codecs = token, max_batch, codecs
        self._jobs: OrderedDict[str, tuple[bytes, asyncio.Task[Response]]] = OrderedDict()

    def check_token(self, given: str | None) -> None:
        """Raises Refused unless `given` is the Authorization header that is asked for."""
        wanted = f"Bearer {self.token}"
        if self.token and not hmac.compare_digest((given or "").encode(), wanted.encode()):
            raise Refused(401, "this server asks for its token, as Authorization: Bearer TOKEN")

    async def answer(self, request: Request, blobs: list[bytes]) -> Response:
        """Scores, once for every key: who asks again waits for the answer that is being made."""
        spec = self._check(request)
        digest = _digest(request, blobs)
        known, job = self._jobs.get(request.key, (digest, None))
        if known != digest:
            raise Refused(
                409, f"the key {request.key!r} stood for another question; take a new one"
            )
        if job is None:
            if sum(not task.done() for _, task in self._jobs.values()) >= MAX_WAITING:
                raise Refused(503, f"{MAX_WAITING} questions are waiting; ask later", retry_after=1)
            job = asyncio.ensure_future(self._score(spec, request, blobs))
            self._jobs[request.key] = (digest, job)
            job.add_done_callback(lambda done: self._forget(request.key, done))
        return await asyncio.shield(job)

    async def close(self) -> None:
        """Ends all rewards; those that do not end in time are named in `hangs`."""
        # Not asyncio's threads: a process that ends would wait for them without limit.
        ends = {n: Thread(target=e.close, daemon=True) for n, e in self.executors.items()}
        for thread in ends.values():
            thread.start()
        limit = time.monotonic() + CLOSING
        while any(t.is_alive() for t in ends.values()) and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        self.hangs = [name for name, thread in ends.items() if thread.is_alive()]

    def _check(self, request: Request) -> RewardSpec:
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
                422, f"reward {spec.name!r} compares groups: send 2 or more pictures of one prompt"
            )
        return spec

    async def _score(self, spec: RewardSpec, request: Request, blobs: list[bytes]) -> Response:
        try:
            images = await asyncio.to_thread(_images, request, blobs)
        except ValueError as error:
            raise Refused(422, str(error)) from error
        why = await asyncio.to_thread(self._misfits, spec, request.items)
        if spec.whole_groups and 0 in why:
            why = dict.fromkeys(range(len(request.items)), why[0])
        rows = [row for row in range(len(request.items)) if row not in why]
        scores: dict[int, float] = {}
        if rows:
            answer = await self._ask(spec, images[rows], [request.items[row] for row in rows])
            scores = dict(zip(rows, answer.scores.tolist(), strict=True))
            why |= {rows[row]: text for row, text in answer.reasons.items()}
        results = [
            Result(id=item.id, score=scores.get(row), error=why.get(row))
            for row, item in enumerate(request.items)
        ]
        return Response(
            protocol=PROTOCOL,
            reward=spec.name,
            version=version_of(spec.reward),
            key=request.key,
            results=results,
        )

    def _misfits(self, spec: RewardSpec, items: Sequence[Item]) -> dict[int, str]:
        """By row, why the reward cannot judge it. To look may take time, a file for one."""
        with self._turns[spec.name]:
            told = ((row, _misfit(spec, item)) for row, item in enumerate(items))
            return {row: text for row, text in told if text is not None}

    async def _ask(self, spec: RewardSpec, images: Tensor, items: list[Item]) -> Answer:
        prompts, metadata = [item.prompt for item in items], [item.metadata for item in items]

        def submit():
            with self._turns[spec.name]:  # an executor that works at once must work alone
                return self.executors[spec.name].submit(images, prompts, metadata)

        try:
            return await asyncio.wrap_future(await asyncio.to_thread(submit))
        except RewardFailure as error:  # no further try would mend it: 4xx, not 5xx
            raise Refused(424, str(error)) from error

    def _forget(self, key: str, done: "asyncio.Task[Response]") -> None:
        """Failures are not remembered, and of the others the latest."""
        if done.cancelled() or done.exception():
            self._jobs.pop(key, None)
        finished = [key for key, (_, task) in self._jobs.items() if task.done()]
        for old in finished[: max(0, len(finished) - REMEMBERED)]:
            del self._jobs[old]


def _misfit(spec: RewardSpec, item: Item) -> str | None:
    """Why a reward cannot judge an item, if so."""
    needed = getattr(spec.reward, "required_metadata", ())
    if missing := [key for key in needed if key not in item.metadata]:
        return f"the metadata lack {', '.join(missing)}"
    check = getattr(spec.reward, "check", None)
    try:
        if not spec.applies(item.prompt, item.metadata):
            return (
                "the reward does not apply to this prompt: name the prompts it is for with "
                "applies_to in the recipe"
            )
        if check is not None:
            check(item.prompt, item.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _images(request: Request, blobs: list[bytes]) -> Tensor:
    """The pictures, (B, 3, H, W) float32 in [0, 1]. Raises ValueError naming the bad one."""
    pictures: list[np.ndarray] = []
    left = MAX_PIXELS
    for item, blob in zip(request.items, blobs, strict=True):
        try:
            picture = decode(blob, request.codec, max_pixels=left)
        except ValueError as error:
            raise ValueError(f"the picture of item {item.id!r} {error}") from error
        if pictures and picture.shape != pictures[0].shape:
            sizes = f"{pictures[0].shape[:2]} and {picture.shape[:2]}"
            raise ValueError(f"pictures of sizes {sizes} in one request; send one size at a time")
        left -= picture.shape[0] * picture.shape[1]
        pictures.append(picture)
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


def _digest(request: Request, blobs: list[bytes]) -> bytes:
    digest = hashlib.sha256(
        request.model_dump_json(exclude={"items": {"__all__": {"image"}}}).encode()
    )
    for blob in blobs:
        digest.update(hashlib.sha256(blob).digest())
    return digest.digest()


def version_of(reward: Reward) -> str:
    return str(getattr(reward, "version", None) or "")

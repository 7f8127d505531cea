"""The client's side of the protocol of docs/reward-servers.md, for one reward."""

import asyncio
import base64
import functools
import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from flowrl.scoring.executors.base import Answer, RewardFailure, failed, read_answer
from flowrl.scoring.executors.servers import Again, Server, Servers, TooLarge, again_until
from flowrl.scoring.protocol import PROTOCOL, Codec, Info, Response, RewardInfo, complaint, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Pictures (b, H, W, 3) uint8 that are judged together, and the names they go by.

    key: the same in every try, so that none counts twice.
    """

    ids: list[str]
    pictures: np.ndarray
    prompts: list[str]
    metadata: list[dict]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A question as it travels. sent: arguments for httpx; size: bytes, at most."""

    sent: dict[str, Any]
    size: int
    multipart: bool


class Client:
    """Fetches what servers say of a reward, and asks it. To be used in one event loop only."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        timeout: float,
        deadline: float,
        codec: Codec,
        token: str | None,
        in_flight: int,
    ):
        self.name, self.deadline = name, deadline
        self.codec: Codec = codec
        self.servers = Servers(name, urls, timeout=timeout, deadline=deadline, token=token)
        self.said: RewardInfo | None = None
        self._version: tuple[str, str] | None = None  # and who said so first
        self._fetching = asyncio.Lock()
        self._slots = asyncio.Semaphore(in_flight)

    @property
    def batches(self) -> list[int]:
        """The most pictures that each server takes; of those that have said it, so after
        `fetch_info` at least one."""
        return [info.max_batch for info in self._infos()]

    async def fetch_info(self, ends: float) -> RewardInfo:
        """What the servers say of the reward; asked once. Raises as `again_until` does, and
        RewardFailure for servers without it, with another codec or with different versions."""
        async with asyncio.timeout_at(ends), self._fetching:
            if self.said is None:
                self.said = await again_until(ends, self._ask_all)
        return self.said

    async def score(self, question: Question, ends: float) -> Answer:
        """Scores, or NaN for all pictures and why. Raises RewardFailure for what no try mends."""
        try:
            async with asyncio.timeout_at(ends), self._slots:
                body = await asyncio.to_thread(self._body, question)
                return await again_until(ends, functools.partial(self._try, question, body))
        except (Again, TimeoutError):
            return failed(len(question.ids), self.too_late())

    def too_late(self) -> str:
        return (
            f"no score within {self.deadline:g} s: {self.servers.troubles()}; see that a server "
            "runs, look at its log, or raise executor.deadline"
        )

    async def _ask_all(self) -> RewardInfo:
        asked = (self._ask_info(server) for server in self.servers.all)
        told = await asyncio.gather(*asked, return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException) and not isinstance(error, Again):
                raise error
        known = [said for said in told if not isinstance(said, BaseException)]
        if not known:
            raise Again(self.servers.troubles())
        return known[0]

    def _infos(self) -> list[Info]:
        return [server.info for server in self.servers.all if server.info is not None]

    async def _ask_info(self, server: Server) -> RewardInfo:
        data = await self.servers.ask(server, "GET", "/v1/info")
        try:
            info = Info.model_validate_json(data)
        except ValidationError as error:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not speak protocol {PROTOCOL} of reward "
                f"servers ({complaint(error)}); look at executor.urls"
            ) from error
        said = next((reward for reward in info.rewards if reward.name == self.name), None)
        if said is None:
            known = ", ".join(reward.name for reward in info.rewards) or "none"
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not serve it; it serves {known}"
            )
        if self.codec not in info.codecs:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} does not take pictures as {self.codec}; set "
                f"executor.codec to one of {', '.join(info.codecs)}"
            )
        self._check_version(server, said.version)
        server.info, server.stale = info, False
        return said

    def _check_version(self, server: Server, version: str) -> None:
        url, first = self._version = self._version or (server.url, version)
        if version != first:
            raise RewardFailure(
                f"reward {self.name!r}: {server.url} has version {version!r}, and {url} had "
                f"{first!r} in this run; their scores do not compare: serve one version"
            )

    def _body(self, question: Question) -> _Body:
        multipart = all("multipart" in info.forms for info in self._infos())
        items: list[dict[str, Any]] = [
            {"id": name, "prompt": prompt, "metadata": metadata}
            for name, prompt, metadata in zip(
                question.ids, question.prompts, question.metadata, strict=True
            )
        ]
        blobs = [encode(picture, self.codec) for picture in question.pictures]
        if not multipart:
            for item, blob in zip(items, blobs, strict=True):
                item["image"] = base64.b64encode(blob).decode()
        head = {"protocol": PROTOCOL, "reward": self.name, "codec": self.codec}
        try:
            text = json.dumps(
                head | {"key": question.key, "items": items}, allow_nan=False
            ).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailure(
                f"reward {self.name!r} is on a server, and metadata travel as JSON: {error}"
            ) from error
        size = len(text) + sum(len(blob) + 200 for blob in blobs) * multipart
        most = max(info.max_body for info in self._infos())
        if size > most:
            raise RewardFailure(
                f"reward {self.name!r}: {len(items)} pictures are {size} bytes, and its server "
                f"takes {most}; lower executor.micro_batch, or raise --max-body there"
            )
        if not multipart:
            sent = {"content": text, "headers": {"Content-Type": "application/json"}}
            return _Body(sent=sent, size=size, multipart=False)
        binary = "application/octet-stream"
        parts = [("image", (str(n), blob, binary)) for n, blob in enumerate(blobs)]
        sent = {"files": [("request", (None, text, "application/json")), *parts]}
        return _Body(sent=sent, size=size, multipart=True)

    async def _try(self, question: Question, body: _Body) -> Answer:
        suits = functools.partial(_suits, len(question.ids), body)
        server = await self.servers.pick(suits)
        if server.stale:
            await self._ask_info(server)
            if not suits(server):
                raise Again(f"{server.url} {server.trouble}")
        try:
            data = await self.servers.ask(server, "POST", "/v1/score", **body.sent)
        except TooLarge:
            before = server.info
            await self._ask_info(server)
            if server.info == before:  # it takes less than it says
                raise
            raise Again(f"{server.url} takes less than before") from None
        try:
            answer = Response.model_validate_json(data)
        except ValidationError as error:
            return self._useless(
                server, question, f"answered no JSON of scores ({complaint(error)})"
            )
        ids = [result.id for result in answer.results]
        if len(ids) != len(question.ids):
            sizes = f"{len(ids)} results for {len(question.ids)} pictures"
            return self._useless(server, question, f"answered with {sizes}")
        if ids != question.ids or answer.reward != self.name:
            return self._useless(server, question, "answered for other pictures than were sent")
        if answer.key != question.key:
            return self._useless(server, question, "answered another question, by its key")
        self.servers.answered(server)
        self._check_version(server, answer.version)
        why = {row: result.error for row, result in enumerate(answer.results) if result.error}
        scores = [math.nan if r.score is None else r.score for r in answer.results]
        values, reasons = read_answer((scores, why), len(ids))
        named = {row: f"{text} (at {server.url})" for row, text in reasons.items()}
        return Answer(scores=values, reasons=named)

    def _useless(self, server: Server, question: Question, what: str) -> Answer:
        self.servers.note_failure(server, what)
        reason = f"{server.url} {what}; look at its log, and compare it with docs/reward-servers.md"
        return failed(len(question.ids), reason)


def _suits(count: int, body: _Body, server: Server) -> bool:
    """Whether a server takes `count` pictures in this form, as far as is known of it."""
    info = server.info
    if info is None or server.stale:
        return True
    if count > info.max_batch:
        server.trouble = f"takes {info.max_batch} pictures at a time, not {count}"
    elif body.size > info.max_body:
        server.trouble = f"takes {info.max_body} bytes at a time, not {body.size}"
    elif body.multipart and "multipart" not in info.forms:
        server.trouble = "takes no multipart/form-data"
    else:
        return True
    return False

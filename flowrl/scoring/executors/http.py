"""Asking a reward on HTTP servers: `flowrl reward-serve`, or any that speaks its protocol.

Whatever the servers do, an answer is there within `deadline` seconds of being asked for.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

import numpy as np
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.executors.base import Answer, RewardFailure, failed, joined, to_levels
from flowrl.scoring.executors.client import Client, Question
from flowrl.scoring.executors.loop import EventLoop
from flowrl.scoring.executors.servers import Again
from flowrl.scoring.protocol import CODECS, TOKEN_RULE, Codec, RewardInfo, sendable

LONGEST = 600.0  # seconds of rest


@dataclass(frozen=True, slots=True)
class _Open:
    """What a Remote has while it is in use."""

    loop: EventLoop
    client: Client


class _Rest:
    """Servers that were silent for a whole deadline twice in a row are left alone, longer each
    time: one that is dead must not cost a deadline at every batch of a run that can do without."""

    def __init__(self, deadline: float):
        self._deadline, self._silences, self._until, self._noted = deadline, 0, 0.0, 0.0

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._until - time.monotonic())

    def note(self, *, heard: bool, began: float) -> None:
        """How what was asked at `began` ended; what was asked at the same time counts once."""
        now = time.monotonic()
        if heard:
            self._silences, self._until = 0, 0.0
        elif began >= self._noted:
            self._silences, self._noted = self._silences + 1, now
            if self._silences > 1:
                self._until = now + min(LONGEST, self._deadline * 2 ** (self._silences - 2))


class Remote:
    """The reward `name` of the servers at `urls`, as executor and as reward.

    It keeps to at most `in_flight` requests of at most `micro_batch` pictures (None: never split;
    groups of a reward that compares them never are). timeout: seconds without a byte, after which
    a request is tried again; deadline: seconds for all tries of one `submit`, its time in the
    queue included. When all servers were silent for that long twice, they are left alone a while.
    token: the servers' bearer token.

    version, bounds, scope, required_metadata and deterministic are asked for at first use, and
    raise RewardFailure when no server says them in time. Raises UserError for addresses, limits,
    codecs and tokens that cannot be.
    """

    differentiable = False

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        timeout: float = 30.0,
        deadline: float = 120.0,
        micro_batch: int | None = 16,
        in_flight: int = 4,
        codec: Codec = "png",
        token: str | None = None,
    ):
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise UserError(f"reward {name!r}: got urls {list(urls)}; expected http://HOST:PORT")
        if codec not in CODECS:
            raise UserError(f"reward {name!r}: codec is one of {', '.join(CODECS)}, not {codec!r}")
        limits = {"timeout": timeout, "deadline": deadline, "in_flight": in_flight}
        for option, value in (limits | {"micro_batch": micro_batch}).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"reward {name!r}: {option} is {value}, expected a finite number more than 0"
                )
        if token and not sendable(token):
            raise UserError(f"reward {name!r}: its token {TOKEN_RULE}")
        self.name, self.deadline, self.micro_batch = name, deadline, micro_batch
        self._urls, self._timeout, self._token = list(urls), timeout, token
        self._codec: Codec = codec
        self._in_flight = in_flight
        self._opening = Lock()
        self._open: _Open | None = None
        self._said: RewardInfo | None = None
        self._rest = _Rest(deadline)

    @property
    def version(self) -> str:
        return self._info().version

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        return self._info().bounds

    @property
    def scope(self) -> str:
        return self._info().scope

    @property
    def required_metadata(self) -> tuple[str, ...]:
        return tuple(self._info().required_metadata)

    @property
    def deterministic(self) -> bool:
        return self._info().deterministic

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        answer = self.submit(images, prompts, metadata).result()
        return answer.scores, dict(answer.reasons)

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> "Future[Answer]":
        if len(images) and not images.isfinite().all():
            future: Future[Answer] = Future()
            future.set_result(failed(len(images), "pictures hold NaN or infinite pixels"))
            return future
        pictures = to_levels(images).permute(0, 2, 3, 1).contiguous().numpy()
        opened = self._opened()
        return opened.loop.start(self._answer(opened, pictures, prompts, metadata))

    def close(self) -> None:
        """Ends all threads; what was not answered is cancelled."""
        with self._opening:
            opened, self._open = self._open, None
        if opened is not None:
            opened.loop.close(opened.client.servers.close())

    def _opened(self) -> _Open:
        """Threads and connections begin at first use: the constructor costs nothing."""
        with self._opening:
            if self._open is None:
                client = Client(
                    self.name,
                    self._urls,
                    timeout=self._timeout,
                    deadline=self.deadline,
                    codec=self._codec,
                    token=self._token,
                    in_flight=self._in_flight,
                )
                self._open = _Open(EventLoop(f"reward {self.name}"), client)
            return self._open

    def _info(self) -> RewardInfo:
        """Raises RewardFailure when no server tells anything."""
        if self._said is None:
            opened = self._opened()
            if left := self._rest.left():
                raise RewardFailure(f"reward {self.name!r}: {self._rest_reason(opened, left)}")
            began = time.monotonic()
            try:
                self._said = opened.loop.start(self._fetch(opened)).result()
            except (Again, TimeoutError) as error:
                self._rest.note(heard=False, began=began)
                reason = opened.client.too_late()
                raise RewardFailure(f"reward {self.name!r}: {reason}") from error
        return self._said

    async def _fetch(self, opened: _Open) -> RewardInfo:
        return await opened.client.fetch_info(asyncio.get_running_loop().time() + self.deadline)

    def _rest_reason(self, opened: _Open, left: float) -> str:
        return (
            f"not asked, since no server answered within {self.deadline:g} s before; the next try "
            f"is in {left:.0f} s: {opened.client.servers.troubles()}"
        )

    async def _answer(
        self, opened: _Open, pictures: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> Answer:
        began = time.monotonic()
        if left := self._rest.left():
            return failed(len(prompts), self._rest_reason(opened, left))
        parts = await self._parts(opened, pictures, prompts, metadata)
        if prompts:
            heard = opened.client.servers.heard >= began
            self._rest.note(heard=heard, began=began)
        return joined(parts, time.monotonic() - began)

    async def _parts(
        self, opened: _Open, pictures: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> list[Answer]:
        ends, count = asyncio.get_running_loop().time() + self.deadline, len(prompts)
        try:
            said = await opened.client.fetch_info(ends)
        except (Again, TimeoutError):
            return [failed(count, opened.client.too_late())]
        size = self._size(said, opened.client.batches, count)
        tasks = [
            asyncio.create_task(opened.client.score(question, ends))
            for question in _split(pictures, prompts, metadata, size)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _size(self, said: RewardInfo, batches: list[int], count: int) -> int:
        """Pictures in one request: every server takes them, or of whole groups one of them."""
        if said.scope == "sample" and self.micro_batch is not None:
            return min(self.micro_batch, *batches)
        most = max(batches)
        if count > most:
            raise RewardFailure(
                f"reward {self.name!r}: {count} pictures must not be split, and its server takes "
                f"{most} at a time; raise --max-batch there, or lower rollout.group_size"
            )
        return max(count, 1)


def _split(
    pictures: np.ndarray, prompts: list[str], metadata: list[dict], size: int
) -> Iterator[Question]:
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        yield Question(
            ids=[str(row) for row in range(len(prompts))[rows]],
            pictures=pictures[rows],
            prompts=prompts[rows],
            metadata=metadata[rows],
        )

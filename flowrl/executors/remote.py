"""Asking a reward on HTTP servers: `flowrl reward-serve`, or any that speaks its protocol.

Whatever the servers do, an answer is there within `deadline` seconds of being asked for.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock

import numpy as np
from torch import Tensor

from flowrl.errors import UserError
from flowrl.executors.background import Background
from flowrl.executors.base import Answer, RewardFailure, failed, joined, to_levels
from flowrl.executors.client import Client, Question
from flowrl.executors.servers import Again
from flowrl.wire import CODECS, TOKEN, Codec, RewardInfo, sendable

HEARTBEAT = 10.0  # seconds
LOG = logging.getLogger(__name__)


class _Open:
    """What a Remote has while it is in use."""

    def __init__(self, background: Background, client: Client):
        self.background, self.client = background, client
        self.waiting: dict[object, tuple[int, float]] = {}  # pictures asked about, and since when

    @contextmanager
    def wait(self, count: int) -> Iterator[None]:
        ticket = object()
        self.waiting[ticket] = (count, time.monotonic())
        try:
            yield
        finally:
            del self.waiting[ticket]


class Remote:
    """The reward `name` of the servers at `urls`, as executor and as reward.

    It keeps to at most `in_flight` requests of at most `micro_batch` pictures (None: never split;
    groups of a reward that compares them never are). timeout: seconds without a byte, after which
    a request is tried again; deadline: seconds for all tries of one `submit`, its time in the
    queue included. token: the servers' bearer token.

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
            raise UserError(f"reward {name!r}: its token {TOKEN}")
        self.name, self.deadline, self.micro_batch = name, deadline, micro_batch
        self._urls, self._timeout, self._token = list(urls), timeout, token
        self._codec: Codec = codec
        self._in_flight = in_flight
        self._opening = Lock()
        self._open: _Open | None = None
        self._said: RewardInfo | None = None

    @property
    def version(self) -> str:
        return self._learned().version

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        return self._learned().bounds

    @property
    def scope(self) -> str:
        return self._learned().scope

    @property
    def required_metadata(self) -> tuple[str, ...]:
        return tuple(self._learned().required_metadata)

    @property
    def deterministic(self) -> bool:
        return self._learned().deterministic

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
        return opened.background.start(self._answer(opened, pictures, prompts, metadata))

    def close(self) -> None:
        """Ends all threads; what was not answered is cancelled."""
        with self._opening:
            opened, self._open = self._open, None
        if opened is not None:
            opened.background.close(opened.client.servers.close())

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
                self._open = _Open(Background(f"reward {self.name}"), client)
                self._open.background.start(_beat(self.name, self._open.waiting))
            return self._open

    def _learned(self) -> RewardInfo:
        """Raises RewardFailure when no server tells anything."""
        if self._said is None:
            opened = self._opened()
            try:
                self._said = opened.background.start(self._learn(opened)).result()
            except (Again, TimeoutError) as error:
                reason = opened.client.too_late()
                raise RewardFailure(f"reward {self.name!r}: {reason}") from error
        return self._said

    async def _learn(self, opened: _Open) -> RewardInfo:
        with opened.wait(0):
            return await opened.client.learn(asyncio.get_running_loop().time() + self.deadline)

    async def _answer(
        self, opened: _Open, pictures: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> Answer:
        began = time.monotonic()
        ends, count = asyncio.get_running_loop().time() + self.deadline, len(prompts)
        with opened.wait(count):
            try:
                said = await opened.client.learn(ends)
            except (Again, TimeoutError):
                return failed(count, opened.client.too_late(), time.monotonic() - began)
            size = self._size(said, opened.client.batches, count)
            tasks = [
                asyncio.create_task(opened.client.score(question, ends))
                for question in _split(pictures, prompts, metadata, size)
            ]
            try:
                parts = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return joined(parts, time.monotonic() - began)

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


async def _beat(name: str, waiting: dict[object, tuple[int, float]]) -> None:
    """Says every now and then that, and for how long, answers are waited for."""
    while True:
        await asyncio.sleep(HEARTBEAT)
        now = time.monotonic()
        late = [(count, now - began) for count, began in waiting.values()]
        if late and (oldest := max(age for _, age in late)) >= HEARTBEAT:
            pending = sum(count for count, _ in late)
            LOG.warning("waiting for reward %s, %d pending, oldest %.0f s", name, pending, oldest)

"""Minutes of waiting in no time: an event loop whose clock jumps to the next thing that is due."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from flowrl_rewards.chat import client


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while there is something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0

    def time(self) -> float:
        return self.at

    def _run_once(self) -> None:
        scheduled = [handle for handle in self._scheduled if not handle._cancelled]  # type: ignore
        if not self._ready and scheduled:  # type: ignore
            self.at = max(self.at, min(handle._when for handle in scheduled))
        super()._run_once()  # type: ignore


class Clock:
    """A virtual clock for the client of judges, and the servers that it asks."""

    def __init__(self, monkeypatch: Any, answer: Callable[[httpx.Request], Any]):
        self.loop = VirtualLoop()

        def connect(url: str, key: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.MockTransport(answer))

        monkeypatch.setattr(client, "connect", connect)
        monkeypatch.setattr(client, "_run", self.loop.run_until_complete)
        monkeypatch.setattr(client, "now", self.loop.time)

    def __call__(self) -> float:
        return self.loop.at

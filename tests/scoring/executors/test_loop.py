"""An event loop in a thread: what is given to it from other threads, and its end."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from flowrl.scoring.executors.http import EventLoop


async def nothing() -> None:
    pass


def test_work_is_done_at_the_same_time_in_a_thread_of_its_own_and_errors_come_to_who_asked():
    loop = EventLoop("reward x")
    both = asyncio.Barrier(2)  # neither passes it alone

    async def meet() -> str:
        await both.wait()
        return threading.current_thread().name

    async def fail() -> None:
        raise LookupError("no face")

    asked = [loop.start(meet()) for _ in range(2)]
    assert [work.result(5) for work in asked] == ["reward x"] * 2
    with pytest.raises(LookupError, match="no face"):
        loop.start(fail()).result(5)
    loop.close(nothing())


def test_closing_cancels_what_runs_and_does_the_last_work_after_it():
    loop, order = EventLoop("ends"), []
    began = threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            order.append("cancelled")

    async def last() -> None:
        order.append("last")

    waits = loop.start(wait())
    assert began.wait(5)
    loop.close(last())
    with pytest.raises(CancelledError):
        waits.result(5)
    assert order == ["cancelled", "last"]
    assert "ends" not in [thread.name for thread in threading.enumerate()]

"""A reward server without its HTTP: what it takes, how it ends."""

import asyncio
import threading
import time

import pytest
import torch

from flowrl.errors import UserError
from flowrl.executors.inline import Inline
from flowrl.reward import RewardSpec
from flowrl.serving import service
from flowrl.serving.app import make_app
from flowrl.wire import LOSSLESS

IMAGES = torch.zeros(1, 3, 8, 8)


def test_names_must_differ_and_exist():
    for rewards in ({}, [], [RewardSpec(name="a", reward=print)] * 2):
        with pytest.raises(UserError, match="different names"):
            make_app(rewards)


def test_closing_does_not_wait_for_a_reward_that_hangs(monkeypatch):
    monkeypatch.setattr(service, "CLOSING", 0.1)
    gate = threading.Event()
    reward = Inline(lambda *_: gate.wait(10), "hangs", background=True)
    spec = RewardSpec(name="hangs", reward=reward.reward, executor=reward)
    made = service.Service([spec], token=None, max_batch=1, codecs=LOSSLESS)
    reward.submit(IMAGES, [""], [{}])

    async def close() -> float:
        began = time.monotonic()
        await made.close()
        took = time.monotonic() - began
        gate.set()
        return took

    assert asyncio.run(close()) < 1.0
    assert made.hangs == ["hangs"]

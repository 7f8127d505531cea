"""A reward server without its HTTP: what it takes, how it ends."""

import asyncio
import threading
import time

import pytest
import torch
from starlette.requests import Request as Asked

from flowrl.errors import UserError
from flowrl.scoring import server as service
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.protocol import LOSSLESS, PROTOCOL, Item, ScoreRequest, encode
from flowrl.scoring.server import MAX_UPLOADS, Refused, Uploads, make_app
from flowrl.scoring.spec import RewardSpec

IMAGES = torch.zeros(1, 3, 8, 8)


def test_names_must_differ_and_exist():
    for rewards in ({}, [], [RewardSpec(name="a", reward=print)] * 2):
        with pytest.raises(UserError, match="different names"):
            make_app(rewards)


class Checks:
    """Looks long at each prompt: until it is told to go on. most: how often at the same time."""

    def __init__(self):
        self.free, self.busy, self.most = threading.Event(), 0, 0

    def check(self, prompt, metadata):
        self.busy += 1
        self.most = max(self.most, self.busy)
        went_on = self.free.wait(5)
        time.sleep(0.02)
        self.busy -= 1
        if not went_on:
            raise ValueError("nothing else went on")

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3))


def question(key: str) -> ScoreRequest:
    return ScoreRequest(
        protocol=PROTOCOL, reward="a", key=key, codec="png", items=[Item(id="0", prompt="p")]
    )


def test_prompts_are_checked_one_after_the_other_while_the_server_goes_on():
    reward = Checks()
    made = service.ScoringService({"a": reward}, max_batch=1, codecs=LOSSLESS)
    png = encode(IMAGES[0].permute(1, 2, 0).byte().numpy(), "png")

    async def ask():
        asked = [asyncio.create_task(made.answer(question(str(k)), [png])) for k in range(3)]
        await asyncio.sleep(0.1)
        reward.free.set()
        answers = await asyncio.gather(*asked)
        await made.close()
        return [answer.results[0] for answer in answers]

    for result in asyncio.run(ask()):
        assert (result.score, result.error) == (0.0, None)
    assert reward.most == 1


def test_closing_does_not_wait_for_a_reward_that_hangs(monkeypatch):
    monkeypatch.setattr(service, "CLOSE_TIMEOUT_S", 0.1)
    asked, gate = threading.Event(), threading.Event()

    def hanging(images, prompts, metadata):
        asked.set()
        return gate.wait(10)

    reward = InlineExecutor(hanging, "hangs", background=True)
    spec = RewardSpec(name="hangs", reward=reward.reward, executor=reward)
    made = service.ScoringService([spec], max_batch=1, codecs=LOSSLESS)
    reward.submit(IMAGES, [""], [{}])
    assert asked.wait(10)  # one that had not begun would only be called off

    async def close() -> float:
        began = time.monotonic()
        await made.close()
        took = time.monotonic() - began
        gate.set()
        return took

    assert asyncio.run(close()) < 1.0
    assert made.not_closed == ["hangs"]


def arriving(ends: bool) -> Asked:
    """A question whose body comes at once or never."""

    async def receive():
        if not ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Asked({"type": "http", "headers": headers}, receive)


async def refusal(uploads: Uploads, asked: Asked) -> Refused:
    with pytest.raises(Refused) as caught:
        async with uploads.read(asked, 100):
            pass
    return caught.value


def test_a_body_that_does_not_end_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(service, "UPLOAD_GRACE_S", 0.05)

    async def upload():
        uploads = Uploads()
        reading = [refusal(uploads, arriving(False)) for _ in range(MAX_UPLOADS)]
        return await asyncio.gather(*reading), await refusal(uploads, arriving(True))

    slow, after = asyncio.run(upload())
    assert {refused.status for refused in slow} == {408} and after.status == 422

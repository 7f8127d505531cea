"""Bodies of questions: how many are read at a time, and for how long."""

import asyncio

import pytest
from starlette.requests import Request as Asked

from flowrl.scoring import server as request_body
from flowrl.scoring.server import MAX_UPLOADS, Refused, Uploads


def arriving(*events: asyncio.Event) -> Asked:
    """A question whose body never ends, or only once all events have come about."""

    async def receive():
        for event in events:
            await event.wait()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Asked({"type": "http", "headers": headers}, receive)


async def refusal(uploads: Uploads, asked: Asked) -> Refused:
    with pytest.raises(Refused) as caught:
        await uploads.read(asked, 100)
    return caught.value


def test_beyond_a_few_bodies_at_a_time_a_client_is_told_to_come_back():
    async def upload():
        uploads, end = Uploads(), asyncio.Event()
        reading = [asyncio.create_task(refusal(uploads, arriving(end))) for _ in range(MAX_UPLOADS)]
        await asyncio.sleep(0)
        late = await refusal(uploads, arriving())
        end.set()
        return late, await asyncio.gather(*reading), await refusal(uploads, arriving())

    late, others, after = asyncio.run(upload())
    assert late.status == 503 and late.retry_after == 1 and str(MAX_UPLOADS) in str(late)
    assert {refused.status for refused in [*others, after]} == {422}  # read: {} is no question


def test_a_body_that_does_not_end_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(request_body, "UPLOAD_TIMEOUT_S", 0.05)

    async def upload():
        uploads = Uploads()
        reading = [refusal(uploads, arriving(asyncio.Event())) for _ in range(MAX_UPLOADS)]
        return await asyncio.gather(*reading), await refusal(uploads, arriving())

    slow, after = asyncio.run(upload())
    assert {refused.status for refused in slow} == {408} and after.status == 422

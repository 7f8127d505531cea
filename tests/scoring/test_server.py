"""A reward behind HTTP gives the scores of the reward itself; whatever is sent, it stays up."""

import base64
import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch

from flowrl.scoring import server
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.protocol import encode
from flowrl.scoring.server import background_spec, make_app
from flowrl.scoring.spec import RewardSpec, load_reward

IMAGE = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
MEAN = IMAGE.mean() / 255
LOCAL = ["127.0.0.1"]


class Watched:
    """The mean of an image, if its prompt has a "mood" and is not "hell"; counts its calls."""

    required_metadata = ("mood",)
    version = "watched-3"
    bounds = (0.0, 1.0)

    def __init__(self):
        self.calls, self.checks_at_once, self.most_checks = 0, 0, 0

    def check(self, prompt, metadata):
        self.checks_at_once += 1
        self.most_checks = max(self.most_checks, self.checks_at_once)
        time.sleep(0.001)
        self.checks_at_once -= 1

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        time.sleep(0.02)
        if "hell" in prompts:
            raise RuntimeError("burnt")
        return images.mean((1, 2, 3))


def ranks(images, prompts, metadata):
    return images.mean((1, 2, 3)).argsort().argsort().float()


def needs_a_package(images, prompts, metadata):
    raise ModuleNotFoundError("No module named 'oldpackage'", name="oldpackage")


ranks.scope = "group"
WATCHED = Watched()
REWARDS = {
    "compressibility": load_reward("compressibility"), "watched": WATCHED, "ranks": ranks,
    "broken": needs_a_package,
}  # fmt: skip


def specs_of(rewards: dict[str, Any]) -> list[RewardSpec]:
    return [background_spec(name, reward) for name, reward in rewards.items()]


@pytest.fixture(scope="module")
def url(serving) -> Iterator[str]:
    with serving(make_app(specs_of(REWARDS), hosts=LOCAL, max_body=2**20)) as url:
        yield url


def message(reward: str = "watched", count: int = 1, image: Any = IMAGE, **changes) -> dict:
    blob = image if isinstance(image, str) else base64.b64encode(encode(image)).decode()
    item = {"prompt": "a", "metadata": {"mood": 1}, "image": blob}
    items = [item | {"id": str(i)} for i in range(count)]
    head = {"protocol": 1, "reward": reward, "key": str(time.monotonic_ns())}
    return head | {"items": items} | changes


def post(url: str, content: dict, **headers: str) -> httpx.Response:
    return httpx.post(url + "/v1/score", json=content, headers=headers, trust_env=False, timeout=30)


def assert_refused(reply: httpx.Response, status: int, *words: str) -> None:
    """One JSON sentence with these words, and never a traceback."""
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    sentence = reply.json()["error"]
    assert "\n" not in sentence and 'File "' not in sentence
    assert all(word in sentence for word in words), sentence


# --- scores ---------------------------------------------------------------------------------------


def test_scores_are_those_of_the_reward_in_process(url):
    levels = np.random.default_rng(0).integers(0, 256, (7, 16, 8, 3), np.uint8)
    images = torch.from_numpy(levels).permute(0, 3, 1, 2).float() / 255
    reward = REWARDS["compressibility"]
    expected = InlineExecutor(reward, "r").submit(images, ["p"] * len(images), [{}] * len(images))
    items = [message(image=image)["items"][0] for image in levels]
    items = [item | {"id": str(n)} for n, item in enumerate(items)]
    reply = post(url, message("compressibility", items=items)).json()
    assert [r["score"] for r in reply["results"]] == expected.result().scores.tolist()
    assert [r["id"] for r in reply["results"]] == [item["id"] for item in items]
    assert reply["version"] == reward.version


def test_what_cannot_be_scored_is_null_with_its_reason(url):
    content = message(count=2)
    content["items"][1]["prompt"] = "hell"
    results = post(url, content).json()["results"]
    assert all(r["score"] is None and "RuntimeError: burnt" in r["error"] for r in results)
    content = message(count=3)
    del content["items"][1]["metadata"]
    first, second, third = post(url, content).json()["results"]
    assert second["score"] is None and "mood" in second["error"]
    assert first["score"] == third["score"] == pytest.approx(MEAN)


def test_a_repeated_request_is_scored_once_and_prompts_are_checked_one_at_a_time(url):
    WATCHED.calls = WATCHED.most_checks = 0
    contents = [message(key=f"once {i % 4}", count=5) for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(lambda content: post(url, content), contents))
    assert {reply.status_code for reply in replies} == {200}
    assert WATCHED.calls == 4 and WATCHED.most_checks == 1
    changed = contents[0] | {"items": [contents[0]["items"][0]]}  # the key of another request
    assert len(post(url, changed).json()["results"]) == 1


# --- refusals -------------------------------------------------------------------------------------

MIXED = message("ranks", count=2)
MIXED["items"][1] |= {"prompt": "b"}


@pytest.mark.parametrize(
    "content, status, words",
    [
        (message("beauty"), 404, "compressibility, watched"),
        (message(image="bm8gaW1hZ2U="), 422, "item '0' is no readable PNG"),
        (message(image=base64.b64encode(pickle.dumps(IMAGE)).decode()), 422, "item '0'"),
        (message(image=np.zeros((513, 512, 3), np.uint8)), 422, "513 x 512 pixels"),
        (message(count=2, image=np.zeros((400, 512, 3), np.uint8)), 422, "400 x 512 pixels"),
        (message("ranks"), 422, "2 or more images of one prompt"),
        (MIXED, 422, "2 or more images of one prompt"),
        (message("broken"), 424, "oldpackage"),
        (message(protocol=7), 422, "protocol"),
        (message(count=300), 413, "at most 256"),
        (message(image="A" * 2**20), 413, "1048576 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_with_a_sentence(url, content, status, words):
    assert_refused(post(url, content), status, words)
    assert httpx.get(url + "/healthz", trust_env=False).json() == {"status": "ready"}


def test_bodies_that_are_no_json_and_other_addresses_are_refused(url):
    for content in (pickle.dumps(message()), b"", b"[" * 100_000):
        kind = {"Content-Type": "application/json"}
        reply = httpx.post(url + "/v1/score", content=content, headers=kind, trust_env=False)
        assert_refused(reply, 422, "protocol")
    assert httpx.get(url + "/", trust_env=False).status_code == 404


def test_a_token_guards_everything_but_the_health_under_any_name(serving):
    with serving(make_app(specs_of(REWARDS), token="secret")) as url:
        assert httpx.get(url + "/healthz", trust_env=False).status_code == 200
        for token in (None, "Bearer wrong", "secret", "Bearer \xe9"):
            headers = {b"Authorization": token.encode("latin-1")} if token else {}
            reply = httpx.get(url + "/v1/info", headers=headers, trust_env=False)
            assert_refused(reply, 401, "token")
        reply = post(url, message(), Authorization="Bearer secret", Host="rewards.example.com")
        assert reply.status_code == 200


# --- memory and load ------------------------------------------------------------------------------


def test_bodies_are_held_of_so_many_requests_at_a_time_and_must_arrive(serving, monkeypatch):
    go, held = threading.Event(), []
    read = server.read_request

    async def count(request):
        held.append(request)
        return await read(request)

    def waits(images, prompts, metadata):
        go.wait(20)
        return images.mean((1, 2, 3))

    monkeypatch.setattr(server, "BODIES_AT_ONCE", 8)
    monkeypatch.setattr(server, "read_request", count)

    image = np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)
    size = len(json.dumps(message("waits", image=image)))
    with serving(make_app(specs_of({"waits": waits}), hosts=LOCAL, max_body=2 * size)) as url:
        with ThreadPoolExecutor(20) as threads:
            jobs = [threads.submit(post, url, message("waits", image=image)) for _ in range(20)]
            while len(held) < 8:
                time.sleep(0.01)
            time.sleep(0.2)
            assert len(held) == 8  # the others wait
            go.set()
        assert {job.result().status_code for job in jobs} == {200}
        monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.3)
        address, claim = ("127.0.0.1", urlsplit(url).port), str(2 * size).encode()
        with ExitStack() as stack:  # bodies that never come take nothing from others
            for _ in range(5):
                slow = stack.enter_context(socket.create_connection(address))
                slow.sendall(
                    b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " + claim
                )
                slow.sendall(b"\r\nContent-Type: application/json\r\n\r\n[")
            assert post(url, message("waits", image=image)).status_code == 200
        with socket.create_connection(address) as slow:
            head = "POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
            slow.sendall(f"{head}Content-Type: application/json\r\n\r\n[".encode())
            assert b" 408 " in slow.recv(4096).splitlines()[0]

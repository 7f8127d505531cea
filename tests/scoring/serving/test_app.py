"""A reward behind HTTP gives the numbers of the reward itself; whatever is sent, it stays up."""

import base64
import functools
import json
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.protocol import LOSSLESS, encode
from flowrl.scoring.server import make_app
from flowrl.scoring.spec import load_reward

IMAGE = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
PNG = encode(IMAGE, "png")
IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255


class Watched:
    """The mean of an image, if its prompt has a "mood" and is not "hell"; counts what it does."""

    required_metadata = ("mood",)
    version = "watched-3"
    bounds = (0.0, 1.0)

    def __init__(self):
        self.calls: list[list[str]] = []
        self.at_once = self.most = 0

    def __call__(self, images, prompts, metadata):
        self.calls.append(prompts)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(0.02)
        self.at_once -= 1
        if "hell" in prompts:
            raise RuntimeError("burnt")
        return images.mean((1, 2, 3)), {}


class Ranks:
    """Compares groups: the rank of each image by its mean."""

    scope = "group"

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3)).argsort().argsort().float()


def missing(images, prompts, metadata):
    raise ModuleNotFoundError("No module named 'oldpackage'", name="oldpackage")


def reads_signs(images, prompts, metadata):
    return [1.0] * len(images)


reads_signs.applies = lambda prompt, metadata: '"' in prompt

WATCHED = Watched()
SLOW = 8
REWARDS = {
    "compressibility": load_reward("compressibility"),
    "watched": WATCHED,
    "ranks": Ranks(),
    "missing": missing,
    "signs": reads_signs,
}


@pytest.fixture(scope="module")
def url(serving) -> Iterator[str]:
    with serving(make_app(REWARDS, token="secret", max_body=2**20, max_batch=40)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        yield client


def question(reward: str = "watched", count: int = 1, **changes) -> dict:
    items = [{"id": str(i), "prompt": "a", "metadata": {"mood": 1}} for i in range(count)]
    head = {"protocol": 1, "reward": reward, "key": f"{time.monotonic_ns()}", "codec": "png"}
    return head | {"items": items} | changes


def parts(asked: dict, *blobs: bytes) -> list:
    return [("request", (None, json.dumps(asked))), *(("image", ("x", blob)) for blob in blobs)]


def with_images(asked: dict, text: str = base64.b64encode(PNG).decode()) -> dict:
    return asked | {"items": [item | {"image": text} for item in asked["items"]]}


def assert_refused(reply: httpx.Response, status: int, *words: str) -> None:
    """One JSON sentence with these words, and never a traceback."""
    assert reply.status_code == status, reply.text
    (sentence,) = reply.json().values()
    assert set(reply.json()) == {"error"} and "\n" not in sentence
    assert "Traceback" not in sentence and 'File "' not in sentence
    for word in words:
        assert word in sentence, sentence


@settings(max_examples=15)
@given(
    levels=arrays(np.uint8, st.tuples(st.integers(1, 7), *map(st.just, (9, 11, 3)))),
    codec=st.sampled_from(LOSSLESS),
    micro_batch=st.sampled_from([None, 1, 3]),
)
def test_the_servers_scores_are_the_rewards_own(url, levels, codec, micro_batch):
    images = torch.from_numpy(levels).permute(0, 3, 1, 2).float() / 255
    asked = images, ["p"] * len(images), [{}] * len(images)
    reward = load_reward("compressibility")
    here = InlineExecutor(reward, "compressibility").submit(*asked).result()
    options = {"codec": codec, "micro_batch": micro_batch, "token": "secret", "timeout": 5.0}
    remote = HTTPExecutor("compressibility", [url], **options)
    there = remote.submit(*asked).result()
    remote.close()
    assert torch.equal(here.scores, there.scores) and not there.reasons


def test_the_json_form_gives_the_same_answer(client):
    asked = question(count=2)
    answers = [
        client.post("/v1/score", files=parts(asked, PNG, PNG)).json(),
        client.post("/v1/score", json=with_images(asked | {"key": "other"})).json(),
    ]
    score = float(torch.from_numpy(IMAGE).float().div(255).mean())
    for answer in answers:
        assert [r["score"] for r in answer["results"]] == pytest.approx([score] * 2)
        assert [r["id"] for r in answer["results"]] == ["0", "1"]
        assert answer["version"] == "watched-3"
    assert answers[0]["results"] == answers[1]["results"]


def test_info_says_what_the_rewards_say(client):
    told = client.get("/v1/info").json()
    assert (told["protocol"], told["max_batch"], told["max_body"]) == (1, 40, 2**20)
    assert told["codecs"] == list(LOSSLESS) and told["forms"] == ["multipart", "json"]
    rewards = {reward["name"]: reward for reward in told["rewards"]}
    assert list(rewards) == list(REWARDS)
    assert rewards["watched"] == {
        "name": "watched", "version": "watched-3", "scope": "sample", "bounds": [0.0, 1.0],
        "required_metadata": ["mood"], "deterministic": True, "differentiable": False,
    }  # fmt: skip
    assert rewards["ranks"]["scope"] == "group"


def test_the_token_guards_everything_but_the_health(url):
    assert httpx.get(url + "/healthz", trust_env=False).json() == {"status": "ready"}
    for token in (None, "Bearer wrong", "secret", "Bearer \xe9"):
        headers = {"Authorization": token.encode()} if token else {}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as stranger:
            assert_refused(stranger.get("/v1/info"), 401, "token")
            assert_refused(stranger.post("/v1/score", files=parts(question(), PNG)), 401, "token")
    with pytest.raises(UserError, match="'watched'.*executor.token_env"):
        HTTPExecutor("watched", [url], token="wrong")(IMAGES, ["a"] * 3, [{}] * 3)


def test_a_wrong_question_is_refused_with_a_sentence(client):
    for asked, blobs, status, words in [
        (question("beauty"), [PNG], 404, ["'beauty'", "compressibility, watched"]),
        (question(), [], 422, ["1 items and 0 parts"]),
        (question(), [PNG] * 2, 422, ["1 items and 2 parts"]),
        (question(), [b"no image"], 422, ["item '0' is no readable PNG"]),
        (question(), [PNG[:-30]], 422, ["item '0' is no readable PNG"]),
        (question(), [pickle.dumps(IMAGE)], 422, ["item '0' is no readable PNG"]),
        (question(count=2), [PNG, encode(IMAGE[:4], "png")], 422, ["(8, 8) and (4, 8)"]),
        (question(count=41), [PNG] * 41, 413, ["at most 40"]),
        (question(codec="jpeg"), [encode(IMAGE, "jpeg")], 422, ["'jpeg'", "use one of png"]),
        (question(codec="bmp"), [PNG], 422, ["codec: "]),
        (question(protocol=7), [PNG], 422, ["protocol: "]),
        (question("ranks"), [PNG], 422, ["2 or more images of one prompt"]),
        (with_images(question()), [PNG], 422, ["JSON form"]),
        (question("missing"), [PNG], 424, ["'missing'", "oldpackage"]),
        (question(), [bytes(2**20)], 413, ["larger than 1048576 bytes"]),
    ]:
        asked = asked | {"key": asked["key"] + str(words)}
        assert_refused(client.post("/v1/score", files=parts(asked, *blobs)), status, *words)


def test_a_wrong_body_is_refused_with_a_sentence(client):
    for content, kind, status, words in [
        (pickle.dumps(question()), "application/octet-stream", 415, ["application/json"]),
        (pickle.dumps(question()), "application/x-pickle", 415, ["application/json"]),
        (pickle.dumps(question()), "application/json", 422, ["Invalid JSON"]),
        (b"", "application/json", 422, ["Invalid JSON"]),
        (b"[" * 100_000, "application/json", 422, ["Invalid JSON"]),
        (json.dumps(question()), "application/json", 422, ["item '0' has no image"]),
        (json.dumps(with_images(question(), "%%")), "application/json", 422, ["no base64"]),
        (b"x" * 2**21, "application/json", 413, ["larger than 1048576 bytes"]),
        (b"x", "multipart/form-data", 400, ["boundary"]),
        (b"nonsense", "multipart/form-data; boundary=b", 400, ["no readable multipart"]),
        (b"--b\r\nContent-Disp", "multipart/form-data; boundary=b", 422, ["no part named"]),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 422, ["no part named request"]),
    ]:
        reply = client.post("/v1/score", content=content, headers={"Content-Type": kind})
        assert_refused(reply, status, *words)
        assert client.get("/healthz").status_code == 200


def test_others_are_served_while_uploads_trickle(client):
    ask = functools.partial(client.post, "/v1/score", headers={"Content-Type": "application/json"})
    begun, end = threading.Barrier(SLOW + 1), threading.Event()

    def trickling():
        yield b"x"
        begun.wait(10)
        end.wait(10)

    with ThreadPoolExecutor(SLOW) as threads:
        slow = [threads.submit(ask, content=trickling()) for _ in range(SLOW)]
        begun.wait(10)
        time.sleep(0.3)  # for what was sent to arrive
        reply = ask(content=b"x" * 2**19)
        end.set()
    assert_refused(reply, 422)
    assert {post.result().status_code for post in slow} == {422}


def test_other_addresses_are_refused_with_a_sentence(client):
    assert_refused(client.get("/"), 404, "POST /v1/score")
    assert_refused(client.get("/v1/score"), 405, "POST /v1/score")
    assert_refused(client.get("/docs"), 404)


def test_a_reward_that_raises_and_an_image_that_cannot_be_judged_give_null_with_the_reason(client):
    asked = question(count=2)
    asked["items"][1]["prompt"] = "hell"
    results = client.post("/v1/score", files=parts(asked, PNG, PNG)).json()["results"]
    burnt = {"score": None, "error": "RuntimeError: burnt"}
    assert results == [{"id": name} | burnt for name in ("0", "1")]
    asked = question(count=3)
    del asked["items"][1]["metadata"]
    reply = client.post("/v1/score", files=parts(asked, PNG, PNG, PNG)).json()
    first, second, third = reply["results"]
    assert second == {"id": "1", "score": None, "error": "the metadata lack mood"}
    assert first["score"] == third["score"] > 0
    (result,) = client.post("/v1/score", files=parts(question("signs"), PNG)).json()["results"]
    assert result["score"] is None and "applies_to" in result["error"]


def test_a_group_comes_in_one_call(url):
    remote = HTTPExecutor("ranks", [url], token="secret", micro_batch=1)
    images = torch.tensor([0.2, 0.8, 0.4, 0.6, 1.0])[:, None, None, None].expand(5, 3, 8, 8)
    scores, _ = remote(images, ["p"] * 5, [{}] * 5)
    remote.close()
    assert scores.tolist() == [0, 3, 1, 2, 4]


def test_questions_wait_for_each_other_and_every_key_is_scored_once(client):
    WATCHED.calls.clear()
    asked = [question(key=f"once {i % 4}") for i in range(12)]
    with ThreadPoolExecutor(SLOW) as threads:
        replies = list(threads.map(lambda a: client.post("/v1/score", files=parts(a, PNG)), asked))
    assert {reply.status_code for reply in replies} == {200}
    assert len(WATCHED.calls) == 4 and WATCHED.most == 1
    assert len({reply.text for reply in replies}) == 4
    other = asked[0] | {"items": [asked[0]["items"][0] | {"prompt": "b"}]}
    assert_refused(client.post("/v1/score", files=parts(other, PNG)), 409, "'once 0'", "new one")

"""The page's server: what it asks, what it writes, whom it refuses."""

import json

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from flowrl.errors import UserError
from flowrl.voting.app import Questions, make_app
from flowrl.voting.ballot import FILE, Ballot
from flowrl.voting.candidates import (
    GRID,
    MOST,
    compressed,
    described,
    palette,
    read_candidates,
)

HOSTILE = "<script>alert(1)</script> \u202e" + "x" * 5000


class Encoder:
    """Stands for an autoencoder: a quarter of the size, three channels."""

    size = (16, 16)

    def __call__(self, images):
        return torch.nn.functional.avg_pool2d(images, 4)


@pytest.fixture
def folder(tmp_path):
    for index, text in enumerate(["a cat", HOSTILE]):
        place = tmp_path / f"{index:05d}"
        (place / "samples").mkdir(parents=True)
        (place / "metadata.jsonl").write_text(json.dumps({"prompt": text}))
        for k in range(3):
            color = (80 * k, 40 * index, 0)
            Image.new("RGB", (20, 16), color).save(place / "samples" / f"{k:04d}.png")
    return tmp_path


@pytest.fixture
def client(folder):
    candidates = read_candidates(folder, Encoder())
    questions = Questions(candidates, Ballot(folder), goal=4, informative=True, seed=0)
    app = make_app(questions, token="secret", hosts=["testserver"])
    headers = {"Authorization": "Bearer secret"}
    return TestClient(app, headers=headers, raise_server_exceptions=False)


def test_a_refusal_names_the_command_that_printed_the_token(client):
    refused = client.get("/api/next", headers={"Authorization": "Bearer other"})
    assert refused.status_code == 401 and "flowrl vote" in refused.json()["error"]
    refused = client.get("/api/next", headers={"Host": "example.com"})
    assert refused.status_code == 421 and "flowrl vote" in refused.json()["error"]


def test_every_answer_is_written_and_the_next_question_follows(client, folder):
    told = client.get("/api/next").json()
    seen = []
    for choice in ("first", "tie", "second", "skip", "first", "first"):
        pair = told["pair"]
        seen.append(frozenset((pair["first"], pair["second"])))
        told = client.post("/api/vote", json=pair | {"choice": choice}).json()
        assert len(Ballot(folder).votes) == told["votes"] == len(seen)
    assert told["pair"] is None and len(set(seen)) == 6  # three pairs of each of two prompts
    told = client.post("/api/undo", json={}).json()
    assert told["votes"] == 5 and told["pair"] is not None
    fresh = Questions(read_candidates(folder, Encoder()), Ballot(folder), goal=4,
                      informative=True, seed=0)  # fmt: skip
    assert fresh.next()["pair"] == told["pair"]  # a new process asks what this one would


def test_what_is_no_vote_is_refused_and_writes_nothing(client, folder):
    other = {"first": 0, "second": 5, "choice": "first"}
    wrongs = [other, other | {"second": 0}, [1], {"first": -1, "second": 1, "choice": "tie"}]
    wrongs += [{"first": 0, "second": 1, "choice": "both"}]
    wrongs += [{"first": True, "second": 0, "choice": "tie"}]
    for wrong in wrongs:
        assert client.post("/api/vote", json=wrong).status_code == 400
    sent = {"content": "{", "headers": {"Content-Type": "application/json"}}
    assert client.post("/api/vote", **sent).status_code == 400
    assert not (folder / FILE).exists()


def test_a_stranger_sees_nothing(client):
    assert client.get("/api/next", headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get("/api/next", headers={"Host": "example.org"}).status_code == 421
    origin = {"Origin": "http://example.org"}
    assert client.post("/api/undo", json={}, headers=origin).status_code == 403
    page = client.get("/", headers={"Authorization": ""})
    assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    )
    for name in ("vote.js", "vote.css", "ask.js", "page.css", "icon.svg"):
        assert client.get(f"/{name}").status_code == 200
    assert "innerHTML" not in client.get("/vote.js").text  # texts are never read as HTML


def test_images_are_shown_and_one_that_is_gone_is_said_to_be(client, folder):
    assert client.get("/api/image?row=0").headers["content-type"] == "image/png"
    assert client.get("/api/image?row=99").status_code == 404
    (folder / "00000" / "samples" / "0000.png").unlink()
    assert client.get("/api/image?row=0").status_code == 404


def test_features_say_what_is_there_and_where(folder):
    """A taste in a colour is seen in the second part wherever the colour is, one in places not."""
    latents = torch.zeros(3, 1, 8, 8)
    latents[0, 0, 0, 0] = latents[1, 0, 7, 7] = latents[2, 0, 7, 6] = 1.0
    none = torch.zeros(3, 1)
    places, whole, _ = described(latents, none).split((GRID**2, 4, 1), dim=1)
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[1], whole[2])
    assert not torch.equal(places[0], places[1]) and torch.equal(places[1], places[2])
    latents[0] *= 2
    assert not torch.equal(*described(latents, none)[:2, GRID**2 :])


def test_a_palette_is_the_share_of_each_colour_wherever_it_is():
    images = torch.zeros(3, 3, 4, 4)
    images[0, 2, 0] = images[1, 2, 3] = 1.0  # a quarter is blue
    images[2, 0, 3] = 1.0  # or red
    found = palette(images)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found.square().sum(1).tolist() == pytest.approx([1, 1, 1])
    assert found[0].square().unique().tolist() == pytest.approx([0, 0.25, 0.75])


def test_features_are_kept_and_have_one_scale(folder):
    first = read_candidates(folder, Encoder())

    def fail(images):
        raise AssertionError("the features were in the folder")

    fail.size = Encoder.size
    assert torch.equal(read_candidates(folder, fail).features, first.features)
    assert first.numbers == (0, 0, 0, 1, 1, 1) and first.texts[3] == HOSTILE
    x = torch.randn(100, 200, generator=torch.Generator().manual_seed(0))
    assert compressed(x).shape == (100, MOST)
    assert compressed(x).std(0).max().item() == pytest.approx(1)
    with pytest.raises(UserError, match="no prompt of .* has two images"):
        for k in (1, 2):
            (folder / "00000" / "samples" / f"{k:04d}.png").unlink()
            (folder / "00001" / "samples" / f"{k:04d}.png").unlink()
        read_candidates(folder, Encoder())

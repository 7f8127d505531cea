"""The page's server: which pairs it shows, what it writes, whom it refuses."""

import pytest
from starlette.testclient import TestClient

from flowrl.voting.app import Questions, make_app
from flowrl.voting.ballot import FILE, Ballot
from flowrl.voting.candidates import read_candidates

HOSTILE = "<script>alert(1)</script> \u202e" + "x" * 5000


@pytest.fixture
def folder(tmp_path, write_images):
    return write_images(tmp_path, ["a cat", HOSTILE])


def questions_of(folder) -> Questions:
    return Questions(read_candidates(folder), Ballot(folder), goal=4, seed=0)


@pytest.fixture
def client(folder):
    app = make_app(questions_of(folder), token="secret", host="127.0.0.1")
    headers = {"Authorization": "Bearer secret"}
    return TestClient(app, "http://127.0.0.1", headers=headers, raise_server_exceptions=False)


def test_every_answer_is_written_and_the_next_question_follows(client, folder):
    answer = client.get("/api/next").json()
    pairs = []
    for choice in ("first", "tie", "second", "skip", "first", "first"):
        pair = answer["pair"]
        pairs.append(frozenset((pair["first"], pair["second"])))
        answer = client.post("/api/vote", json=pair | {"choice": choice}).json()
        assert len(Ballot(folder).votes) == answer["votes"] == len(pairs)
    assert answer["pair"] is None and len(set(pairs)) == 6  # three pairs of each of two prompts
    answer = client.post("/api/undo", json={}).json()
    assert answer["votes"] == 5 and answer["pair"] is not None
    assert questions_of(folder).next()["pair"] == answer["pair"]  # as in a new process


def test_a_body_that_is_not_a_vote_is_refused_and_writes_nothing(client, folder):
    other = {"first": 0, "second": 5, "choice": "first"}
    wrong = [other, other | {"second": 0}, [1], {"first": -1, "second": 1, "choice": "tie"}]
    wrong += [{"first": 0, "second": 1, "choice": "both"}, {}]
    for body in wrong:
        assert client.post("/api/vote", json=body).status_code in (409, 422)
    assert not (folder / FILE).exists()


def test_images_are_answered_and_a_missing_one_is_a_404(client, folder):
    assert client.get("/api/image?row=0").headers["content-type"] == "image/png"
    assert client.get("/api/image?row=99").status_code == 404
    (folder / "00000" / "samples" / "0000.png").unlink()
    assert client.get("/api/image?row=0").status_code == 404

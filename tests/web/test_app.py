"""Who is let in and what is answered: token, host, origin, paths, 304s."""

import pytest
import uvicorn
from starlette.testclient import TestClient

from flowrl.utils.journal import seal_line
from flowrl.web.app import make_app
from flowrl.web.page import POLICY

TOKEN = "a-token"
HOME = "http://127.0.0.1:8401"


@pytest.fixture
def client(make_folder, tmp_path):
    make_folder("run")
    make_folder("other", recipe={"optim": {"lr": 2}})
    return TestClient(make_app(tmp_path / "runs", token=TOKEN, host="127.0.0.1"), HOME)


def ask(client, path: str, method: str = "GET", **given):
    headers = {"authorization": f"Bearer {TOKEN}"} | given.pop("headers", {})
    return client.request(method, path, headers=headers, **given)


def test_every_address_with_anything_of_a_run_wants_the_token(client):
    routes = [route for route in client.app.routes if route.path.startswith("/api/")]
    assert len(routes) == 13
    for method, path in [(m, r.path) for r in routes for m in r.methods - {"HEAD"}]:
        for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": TOKEN}):
            answer = client.request(method, path, headers=wrong, json={})
            assert answer.status_code == 401 and set(answer.json()) == {"error"}, path


def test_every_answer_forbids_loading_from_elsewhere_framing_and_keeping(client):
    for path in ("/", "/page.js", "/api/runs", "/api/none", "/none"):
        headers = ask(client, path).headers
        assert headers["content-security-policy"] == POLICY, path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["cache-control"] == "no-store", path
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY and "http" not in POLICY
    assert client.get("/").status_code == 200


def test_what_has_not_changed_is_not_sent_again(client, tmp_path):
    paths = ("/api/runs", "/api/run?run=run", "/api/curves?run=run&metric=loss", "/api/jobs")
    for step, path in enumerate(paths, 5):
        first = ask(client, path)
        tag = {"if-none-match": first.headers["etag"]}
        again = ask(client, path, headers=tag)
        assert (again.status_code, again.content) == (304, b""), path
        with open(tmp_path / "runs" / "run" / "metrics.jsonl", "a") as file:
            file.write(seal_line({"step": step, "loss": 0.25}).decode() + "\n")
        now = ask(client, path, headers=tag)
        assert now.status_code == (304 if path == "/api/jobs" else 200), path


def test_other_machines_are_let_in_with_a_chosen_token_alone(flowrl, monkeypatch, tmp_path):
    monkeypatch.setenv("UI_TOKEN", "two words")
    (tmp_path / "file").touch()
    for words, told in (
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets other machines in"),
        (("--token-env", "NOT_THERE"), "no such variable"),
        (("--token-env", "UI_TOKEN"), "visible ASCII"),
        ((tmp_path / "file",), "expected a folder of runs"),
    ):
        code, _, err = flowrl("ui", *words)
        assert code == 1 and told in err


def test_the_token_is_quoted_in_the_address(flowrl, monkeypatch, tmp_path):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setenv("UI_TOKEN", "a<token>&")
    _, out, _ = flowrl("ui", tmp_path, "--port", "0", "--token-env", "UI_TOKEN")
    assert out.rstrip().endswith("/#token=a%3Ctoken%3E%26")

"""The guard of every server: hosts, origins, tokens, deep JSON."""

import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from flowrl.errors import UserError
from flowrl.utils.serving import (
    Access,
    Guard,
    address_of,
    bind,
    host_name,
    is_loopback,
    json_body,
    local_names,
    read_token,
)


def make_app(**changed) -> Starlette:
    async def echo(request):
        try:
            return JSONResponse(await json_body(request))
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)

    def plain(request):
        return JSONResponse({})

    app = Starlette(
        routes=[
            Route("/v1/echo", echo, methods=["POST"]),
            Route("/v1/info", plain),
            Route("/", plain),
        ]
    )
    settings = {
        "server": "flowrl ui", "hosts": frozenset({"127.0.0.1"}), "token": "a-token",
        "private": "/v1", "max_body": 10**6, "headers": {"X-Added": "yes"},
    }  # fmt: skip
    app.add_middleware(Guard, access=Access(**settings | changed))
    return app


@pytest.mark.parametrize("token", ["a-token", None])
def test_hosts_and_origins_are_checked_with_and_without_a_token(token):
    client = TestClient(make_app(token=token), "http://127.0.0.1:8401")
    sent = {"authorization": "Bearer a-token"} if token else {}

    def status(method="GET", path="/v1/info", **headers) -> int:
        return client.request(method, path, headers=sent | headers, json={}).status_code

    assert status() == status("POST", "/v1/echo") == 200
    assert status("POST", "/v1/echo", origin="http://127.0.0.1:8401") == 200
    for host in ("evil.example.com", "127.0.0.1.example.com", ""):
        assert status(host=host) == 421, host
    for origin in ("http://example.com", "http://127.0.0.1:9", "null"):
        assert status("POST", "/v1/echo", origin=origin) == 403, origin
        assert status(origin=origin) == 403, origin
    assert status("POST", "/v1/echo", **{"content-type": "text/plain"}) == 415
    assert status("POST", "/v1/echo", **{"content-length": "1000001"}) == 413
    wrong = client.get("/v1/info", headers={"authorization": "Bearer other"})
    assert wrong.status_code == (401 if token else 200) and wrong.headers["x-added"] == "yes"
    assert client.get("/").status_code == 200


def test_a_server_without_a_list_of_hosts_answers_every_name_that_has_the_token():
    client = TestClient(make_app(hosts=None), "http://example.com")
    assert client.get("/v1/info").status_code == 401
    headers = {"authorization": "Bearer a-token"}
    assert client.get("/v1/info", headers=headers).status_code == 200


def test_a_deep_body_is_refused_in_one_sentence():
    client = TestClient(make_app(token=None), "http://127.0.0.1")
    for text in ("[" * 100_000, '{"a":' * 50_000, "not JSON"):
        head = {"content-type": "application/json"}
        answer = client.post("/v1/echo", content=text, headers=head)
        assert answer.status_code == 400 and "request" in answer.json()["error"]


def test_more_connections_than_the_limit_are_refused(serving):
    for connections, code in ((1, 503), (2, 200)):
        with serving(make_app(token=None), connections=connections) as url:
            assert httpx.get(url).status_code == code


def test_names_of_hosts_are_read_without_ports_and_brackets():
    hosts = ["localhost", "LOCALHOST:8401", "[::1]:8401", "[::1]", "::1", "127.0.0.1:80"]
    names = ["localhost", "localhost", "::1", "::1", "::1", "127.0.0.1"]
    assert [host_name(host) for host in hosts] == names


def test_other_machines_are_let_in_with_a_token_alone(monkeypatch):
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0")] == [
        True, True, True, False,
    ]  # fmt: skip
    assert read_token("127.0.0.1", None) is None
    monkeypatch.setenv("SPACES", "two words")
    for host, variable in (("0.0.0.0", None), ("127.0.0.1", "MISSING"), ("127.0.0.1", "SPACES")):
        with pytest.raises(UserError, match="token"):
            read_token(host, variable)


def test_a_server_of_this_machine_answers_to_its_own_names_alone():
    assert local_names("127.0.0.1") == {"127.0.0.1", "localhost", "::1"}
    assert local_names("0.0.0.0") is None is local_names("Box")
    for host, printed in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())):
        with bind(host, 0) as made:
            assert address_of(host, made) == f"http://{printed}:{made.getsockname()[1]}"

"""The guard of every server: hosts, origins, tokens."""

import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from flowrl.utils.serving import (
    Access,
    Guard,
    address_of,
    host_name,
    is_loopback,
    listen,
    local_names,
)


def make_app(**changed) -> Starlette:
    def plain(request):
        return JSONResponse({})

    app = Starlette(
        routes=[
            Route("/v1/echo", plain, methods=["POST"]),
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


def test_more_connections_than_the_limit_are_refused(serving):
    for connections, code in ((1, 503), (2, 200)):
        with serving(make_app(token=None), connections=connections) as url:
            assert httpx.get(url).status_code == code


def test_names_of_hosts_are_read_without_ports_and_brackets():
    hosts = ["localhost", "LOCALHOST:8401", "[::1]:8401", "[::1]", "::1", "127.0.0.1:80"]
    names = ["localhost", "localhost", "::1", "::1", "::1", "127.0.0.1"]
    assert [host_name(host) for host in hosts] == names


def test_a_server_of_this_machine_answers_to_its_own_names_alone():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost"))) and not is_loopback("0.0.0.0")
    assert local_names("127.0.0.1") == {"127.0.0.1", "localhost", "::1"}
    assert local_names("0.0.0.0") is None is local_names("Box")
    for host, printed in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())):
        with listen(host, 0) as made:
            assert address_of(host, made) == f"http://{printed}:{made.getsockname()[1]}"

"""The guard of every server: hosts, origins, tokens, half-open connections, deep JSON."""

import contextlib
import json
import socket
import threading
import time

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
    check_names,
    host_name,
    is_loopback,
    json_body,
    make_server,
    read_token,
    server_names,
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
        "private": "/v1", "max_body": 10**6, "json_only": True, "headers": {"X-Added": "yes"},
    }  # fmt: skip
    app.add_middleware(Guard, access=Access(**settings | changed))
    return app


@contextlib.contextmanager
def serving(app, **limits):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(app, **limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


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


def half_open(port: int, count: int) -> list[socket.socket]:
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for connection in made:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    return made


def is_closed(connection: socket.socket) -> bool:
    """Whether a connection was ended, or refused with a 503."""
    connection.settimeout(5)
    try:
        return connection.recv(12) in (b"", b"HTTP/1.1 503")
    except ConnectionResetError:
        return True


def test_half_open_connections_stop_nobody_and_end():
    with serving(make_app(), connections=16, header_timeout=0.5) as port:
        attackers = half_open(port, 200)
        status = 503
        while status == 503:  # until the first of them have ended
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"http://127.0.0.1:{port}/", timeout=10).status_code
        assert status == 200
        assert all(is_closed(attacker) for attacker in attackers)
        for attacker in attackers:
            attacker.close()


def test_a_client_beyond_the_limit_reads_a_503_with_the_limit():
    entered, leave = threading.Semaphore(0), threading.Event()

    def slow(request):
        entered.release()
        leave.wait(20)
        return JSONResponse({})

    app = Starlette(routes=[Route("/", slow, methods=["POST"])])
    with serving(app, connections=4) as port:
        url = f"http://127.0.0.1:{port}/"
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(url, timeout=20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert entered.acquire(timeout=10)
        refused = [httpx.post(url, content=b"x" * 10**6, timeout=10) for _ in range(4)]
        leave.set()
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    for answer in refused:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "4 connections" in json.loads(answer.text)["error"]


def test_names_of_hosts_are_read_without_ports_and_brackets():
    hosts = ["localhost", "LOCALHOST:8401", "[::1]:8401", "[::1]", "::1", "127.0.0.1:80"]
    names = ["localhost", "localhost", "::1", "::1", "::1", "127.0.0.1"]
    assert [host_name(host) for host in hosts] == names
    assert check_names(["Box.example.com"]) == ["box.example.com"]
    for name in ("http://example.com", "box:8401", "", " box"):
        with pytest.raises(UserError, match="--allow-host"):
            check_names([name])


def test_other_machines_are_let_in_with_a_token_alone(monkeypatch):
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0")] == [
        True, True, True, False,
    ]  # fmt: skip
    assert read_token("127.0.0.1", None) is None
    monkeypatch.setenv("SPACES", "two words")
    for host, variable in (("0.0.0.0", None), ("127.0.0.1", "MISSING"), ("127.0.0.1", "SPACES")):
        with pytest.raises(UserError, match="token"):
            read_token(host, variable)


def test_a_wildcard_gets_the_names_of_this_machine():
    for wildcard in ("0.0.0.0", "::"):
        reachable, names = server_names(wildcard, wildcard)
        assert reachable in names and (":" in reachable) == (":" in wildcard)
        assert wildcard not in names
    loopback = ["127.0.0.1", "localhost", "::1"]
    assert server_names("Box", "192.0.2.7") == ("Box", [*loopback, "box", "192.0.2.7"])

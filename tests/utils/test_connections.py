"""Half-open and too many connections, to a real server."""

import contextlib
import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


def half_open(url: str, count: int) -> list[socket.socket]:
    port = urlsplit(url).port
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


def test_half_open_connections_stop_nobody_and_end(serving, monkeypatch):
    monkeypatch.setattr("flowrl.utils.connections.LINGER_S", 0.5)
    app = Starlette(routes=[Route("/", lambda request: JSONResponse({}))])
    with serving(app, connections=16, header_timeout=0.5) as url:
        attackers = half_open(url, 200)
        status = 503
        while status == 503:  # until the first of them have ended
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(url, timeout=1).status_code
        assert status == 200
        assert all(is_closed(attacker) for attacker in attackers)
        for attacker in attackers:
            attacker.close()


def test_a_client_beyond_the_limit_reads_a_503_with_the_limit(serving):
    entered, leave = threading.Semaphore(0), threading.Event()

    def slow(request):
        entered.release()
        leave.wait(20)
        return JSONResponse({})

    app = Starlette(routes=[Route("/", slow, methods=["POST"])])
    with serving(app, connections=4) as url:
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

"""Half-open and too many connections, to a real server."""

import contextlib
import json
import socket
import threading
import time

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from flowrl.utils.connections import make_server


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
    app = Starlette(routes=[Route("/", lambda request: JSONResponse({}))])
    with serving(app, connections=16, header_timeout=0.5) as port:
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

"""A loopback server that says what the test tells it to, as a chat server does or otherwise."""

import base64
import contextlib
import io
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np
from PIL import Image


def completion(text: str = "", tokens: dict[str, float] | None = None, **message: Any) -> dict:
    """A chat completion; tokens: probabilities of spellings of its first token."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text} | message,
    }
    if tokens is not None:
        top = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in tokens.items()]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}], "refusal": None}
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]
    }  # fmt: skip


def refusal(status: int, **headers: str) -> tuple[int, dict, bytes]:
    return status, headers, b'{"error": {"message": "told to"}}'


def text_of(body: dict) -> str:
    return body["messages"][0]["content"][-1]["text"]


def images_of(body: dict) -> list[np.ndarray]:
    """The images of a request, (H, W, 3) uint8."""
    parts = (p for p in body["messages"][0]["content"] if p["type"] == "image_url")
    urls = (part["image_url"]["url"].removeprefix("data:image/png;base64,") for part in parts)
    return [np.array(Image.open(io.BytesIO(base64.b64decode(url)))) for url in urls]


def redness(image: np.ndarray) -> float:
    """In [0, 1]: how much more red than blue there is."""
    mean = image.reshape(-1, 3).mean(0)
    return float((mean[0] - mean[2]) / 255 + 1) / 2


class Scripted:
    """script(body) -> a completion (dict), bytes for a body of its own, (status, headers, body),
    or a callable that is given the raw connection. The body of a GET is empty."""

    def __init__(self, script: Callable[[dict], Any]):
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.ending = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer._say(self, script({}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.keys.append(self.headers["Authorization"])
                outer._say(self, script(body))

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # a call that finds it full comes back a second later
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _say(self, handler: BaseHTTPRequestHandler, answer: Any) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            if callable(answer):
                handler.close_connection = True
                return answer(handler.wfile)
            status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            handler.send_response(status)
            headers = {"Content-Type": "application/json", "Content-Length": len(body)} | headers
            for name, value in headers.items():
                handler.send_header(name, str(value))
            handler.end_headers()
            handler.wfile.write(body)

    def hang(self, wfile: Any) -> None:
        """No answer until the test is over."""
        self.ending.wait(30)

    def drip(self, wfile: Any) -> None:
        """An answer whose bytes come one by one: no single read takes long."""
        wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
        while not self.ending.wait(0.05):
            wfile.write(b" ")
            wfile.flush()

    def truncated(self, wfile: Any) -> None:
        """Half of an answer."""
        wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done inside takes no longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds

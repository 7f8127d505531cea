"""An application behind a real socket, as the command serves it."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from flowrl.utils.connections import make_server

sys.path.insert(0, str(Path(__file__).parent))  # helper modules lie beside the tests


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """(app) -> a context whose value is its address."""
    return _serving


@contextmanager
def _serving(app) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()

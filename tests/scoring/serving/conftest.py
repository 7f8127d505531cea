"""An application behind a real socket."""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parent))  # helper modules lie beside the tests


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """(app) -> a context whose value is its address."""
    return _serving


@contextmanager
def _serving(app) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()

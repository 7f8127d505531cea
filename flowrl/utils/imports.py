"""Load a user's own component by its import path, and many modules in less time."""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def load_callable(target: str) -> Callable[..., Any]:
    """Return the attribute of `module:attribute`, searched last in the working directory.

    Raises LookupError naming what was found, and where.
    """
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise LookupError(f"{target!r} is not written as module:attribute")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the `flowrl` command starts without it
    try:
        component = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        package = sys.modules.get(module.partition(".")[0])
        where = list(getattr(package, "__path__", [])) or getattr(package, "__file__", None)
        place = f"the package found lies at {where}" if where else "no such package was found"
        raise LookupError(f"{error} ({place})") from error
    if not callable(component):
        raise LookupError(f"it is {component!r}, expected a class or a function")
    return component


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep what only Python's garbage collector would free; it looks through all that is imported.

    With torch, transformers and diffusers that search takes a fifth of their import.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

"""Load a user's own component by its import path."""

import importlib
import os
import sys
from collections.abc import Callable
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

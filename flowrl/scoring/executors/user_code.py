"""Run a user's code: contain what it changes in the process, and say where it failed."""

import linecache
import locale
import os
import random
import socket
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

# What training depends on and code can change for the whole process: (read, write).
SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "numpy.seterr": (np.geterr, lambda value: np.seterr(**value)),
    "numpy.set_printoptions": (np.get_printoptions, lambda value: np.set_printoptions(**value)),
    "os.chdir": (os.getcwd, os.chdir),
    "locale.setlocale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    "socket.setdefaulttimeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
}
_reported: set[tuple[str, str]] = set()


@contextmanager
def contained_settings(name: str) -> Iterator[None]:
    """Restore the process's settings and random generators after code of the reward `name`.

    A changed setting is reported once. The generators of Python, NumPy and torch get a new seed for
    the block, drawn from Python's: code that seeds them, or draws from them, does not shift what is
    drawn outside. In other threads nothing is restored, since the main thread may have changed a
    setting meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {setting: read() for setting, (read, _) in SETTINGS.items()}
    with _seeded_generators():
        try:
            yield
        finally:
            for setting, (read, write) in SETTINGS.items():
                if _read(read) != before[setting]:
                    write(before[setting])
                    if (name, setting) not in _reported:
                        _reported.add((name, setting))
                        warnings.warn(
                            f"reward {name!r} changed a setting of the whole process, which was "
                            f"restored: {setting}",
                            stacklevel=2,
                        )


def _read(read: Callable[[], Any]) -> Any:
    with suppress(OSError):  # a working directory that was removed
        return read()


@contextmanager
def _seeded_generators() -> Iterator[None]:
    seed = random.getrandbits(32)
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# --- errors ---------------------------------------------------------------------------------------

LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        Path(__file__).parents[2],
    )
)


def describe_error(error: BaseException) -> str:
    """Return an exception's class, text and the line of the user's own code that it came from.

    That line is the innermost one outside of Python's library, of installed packages and of
    flowrl; without one the text ends after the exception's.
    """
    text = f"{type(error).__name__}: {error}"
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")):
            line = linecache.getline(file, number).strip()
            return f"{text} ({_short(file)}:{number}: {line})"
    return text


def _short(file: str) -> str:
    """Return a path below the working directory without it."""
    with suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file

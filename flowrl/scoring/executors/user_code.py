"""Run a user's code: contain what it changes in the process, and say where it failed."""

import gc
import os
import signal
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # read, write

DEVICES = ("cpu", "cuda")


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# What training depends on and code can change: for its own thread, and for the whole process.
OF_THREAD: Mapping[str, Setting] = {
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_device": (
        lambda: str(torch.get_default_device()),
        lambda value: torch.set_default_device(None if value == "cpu" else value),
    ),
    "torch.set_autocast_enabled": (
        lambda: {device: torch.is_autocast_enabled(device) for device in DEVICES},
        lambda value: [torch.set_autocast_enabled(*pair) for pair in value.items()],
    ),
}
OF_PROCESS: Mapping[str, Setting] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
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
    **{
        f"torch.backends.cudnn.{name}": _attribute(torch.backends.cudnn, name)
        for name in ("deterministic", "benchmark", "enabled")
    },
    **{
        f"torch.backends.cuda.enable_{name}_sdp": (
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "os.chdir": (os.getcwd, os.chdir),
}
# What flowrl changes itself in the main thread, so that calls beside it must not restore it, and
# handlers of signals, which that thread alone can set.
OF_MAIN_THREAD: Mapping[str, Setting] = {
    "gc.disable": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    **{
        f"signal.{number.name}": (partial(signal.getsignal, number), partial(signal.signal, number))
        for number in (signal.SIGINT, signal.SIGTERM)
    },
}
_reported: set[tuple[str, str]] = set()
# Calls of rewards in all threads share one record of the settings, read before the first of them:
# one that begins while another has changed a setting must not restore that change.
_calls = threading.Lock()
_open_calls = 0
_before_calls: dict[str, Any] = {}


@contextmanager
def contained_settings(name: str) -> Iterator[None]:
    """Restore settings after code of the reward `name`. A changed setting is reported once."""
    global _open_calls
    in_main = threading.current_thread() is threading.main_thread()
    of_thread = {**OF_THREAD, **(OF_MAIN_THREAD if in_main else {})}
    before_thread = {setting: read() for setting, (read, _) in of_thread.items()}
    with _calls:
        if not _open_calls:
            _before_calls.update({setting: read() for setting, (read, _) in OF_PROCESS.items()})
        _open_calls += 1
    try:
        yield
    finally:
        changed = _restore(of_thread, before_thread)
        with _calls:
            _open_calls -= 1
            # In the background only after the last call: another may be loading a model,
            # which changes settings for a while. A call of the main thread never waits.
            if in_main or not _open_calls:
                changed += _restore(OF_PROCESS, _before_calls)
        for setting in changed:
            if (name, setting) not in _reported:
                _reported.add((name, setting))
                warnings.warn(
                    f"reward {name!r} changed a setting of the whole process, which was "
                    f"restored: {setting}",
                    stacklevel=2,
                )


def _restore(settings: Mapping[str, Setting], before: Mapping[str, Any]) -> list[str]:
    """Set what differs from `before`; return the names."""
    changed = [name for name, (read, _) in settings.items() if _read(read) != before[name]]
    for name in changed:
        settings[name][1](before[name])
    return changed


def _read(read: Callable[[], Any]) -> Any:
    with suppress(OSError):  # a working directory that was removed
        return read()


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
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*LIBRARIES, "<")):
            return f"{text} ({frame.filename}:{frame.lineno}: {frame.line})"
    return text

"""Run one reward in a process of a pool, on one thread; the first micro-batch loads it.

This module imports neither torch nor numpy, whose libraries read `ONE_THREAD` when they are loaded.
"""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from flowrl.scoring.executors.base import InlineExecutor

# Scores (B,) as a float32 array with reasons by row, by component, the reward's own under ""; or
# one text: why none can ever be made.
Reply = dict[str, tuple["np.ndarray", dict[int, str]]] | str

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VISIBLE = "CUDA_VISIBLE_DEVICES"  # read when a process first asks for a GPU
LOOK = 1.0  # seconds between looks at whether the parent lives, where no signal of its end arrives

_swapping = threading.Lock()
_setup: tuple[str, dict[str, Any], str] | None = None
_executor: "InlineExecutor | None" = None


class _Process(SpawnProcess):
    def start(self) -> None:
        with _without_main():
            super().start()


class Context(SpawnContext):
    """Spawned processes that do not import the script that was started: one without
    `if __name__ == "__main__":` would train a second time."""

    Process = _Process  # pyright: ignore[reportAssignmentType]


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    with _swapping:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def prepare(
    target: str, args: Mapping[str, Any], name: str, visible: str | None = None, debug: bool = False
) -> None:
    """Set up a new process; `score` loads the reward, so that its errors are reported.

    visible: name of the only GPU that it sees, None for all. debug: print tracebacks.
    """
    global _setup
    os.environ.update(ONE_THREAD | ({} if visible is None else {VISIBLE: visible}))
    _setup = target, dict(args), name
    if debug:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("flowrl").setLevel(logging.DEBUG)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def score(levels: "np.ndarray", prompts: list[str], metadata: list[dict]) -> Reply:
    """Score images (B, 3, H, W) uint8. Returns plain data: not every exception can be pickled."""
    import torch

    from flowrl.scoring.executors.base import InlineExecutor, RewardFailure, failed
    from flowrl.scoring.executors.user_code import describe_error
    from flowrl.scoring.spec import load_reward

    global _executor
    assert _setup is not None
    target, args, name = _setup
    if _executor is None:
        torch.set_num_threads(1)
        try:
            _executor = InlineExecutor(load_reward(target, args), name)
        except Exception as error:
            return f"reward {name!r} cannot be loaded in another process: {error}"
    images = torch.from_numpy(levels).float() / 255  # exactly what `scorer.quantise` made
    try:
        answer = _executor.submit(images, prompts, metadata).result()
    except RewardFailure as error:
        return str(error)
    except BaseException as error:  # a reward that calls sys.exit, for one
        answer = failed(len(prompts), describe_error(error))
    parts = {"": answer, **answer.components}
    return {name: (part.scores.numpy(), dict(part.reasons)) for name, part in parts.items()}


def _end_with_parent() -> None:
    """End this process when the one that started it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(LOOK)
    os._exit(1)

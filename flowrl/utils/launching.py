"""Start a program as several processes of this machine, as torchrun does, and end with it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrl.errors import UserError
from flowrl.utils.stopping import passed_on

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE = 60.0  # seconds after a failure in which the other processes save and end by themselves
SAVING = 30.0  # seconds between asking those that are left to end and killing them
LAUNCHER = "FLOWRL_LAUNCHER"  # variable of the environment: number of the launcher's process


def check_no_launcher(option: str) -> None:
    """Raise UserError if a launcher has started this process as one of several."""
    if "LOCAL_RANK" in os.environ:
        raise UserError(
            f"{option} starts the processes itself, but a launcher has started this one already: "
            f"leave {option} out, or start without the launcher"
        )


def count_processes(gpus: str, *, device: str) -> tuple[int, bool]:
    """Return how many processes to start, and whether they compute on the CPU.

    Args:
        gpus: "auto" for as many as there are GPUs, or a number; without a GPU they share the CPU.
        device: `pipeline.device` of the recipe.

    Raises:
        UserError: for another word, and for more processes than GPUs.
    """
    import torch

    if gpus != "auto" and not (gpus.isdecimal() and int(gpus)):
        raise UserError(f"--gpus is {gpus!r}, expected auto or a number of GPUs from 1")
    present = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus == "auto":
        return max(present, 1), not present
    if device == "cuda" and not present or present and int(gpus) > present:
        raise UserError(
            f"--gpus is {gpus}, but torch finds {present} here: give a smaller number, or auto"
        )
    return int(gpus), not present


def run_processes(command: Sequence[str], count: int, *, cpu: bool) -> int:
    """Run a command as `count` processes that connect to each other; wait for all of them.

    They listen on loopback alone. Signals are passed on to them, so that each ends when it can.
    When one fails the others get PATIENCE seconds to save and to end.

    Returns:
        The exit code of the first that failed, as a shell has it, or 0.
    """
    store = _open_store()
    common = _variables(store.port, count, cpu=cpu)
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    try:
        with passed_on(pass_on):
            for rank in range(count):
                variables = common | {"RANK": rank, "LOCAL_RANK": rank}
                environment = os.environ | {name: str(value) for name, value in variables.items()}
                # In a session of its own: Ctrl-C would reach it twice, which ends it at once.
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            return _wait(processes)
    finally:
        for process in processes:
            process.kill()


def _open_store() -> "TCPStore":
    """Return the store through which processes find each other, as torchrun's agent holds one.

    It outlives each process that writes into it. By an address alone torch would listen on every
    interface of the machine.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _variables(port: int, count: int, *, cpu: bool) -> dict[str, Any]:
    """Return the environment that all processes share, as torchrun sets it."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables: dict[str, Any] = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, LAUNCHER: os.getpid(),
    }  # fmt: skip
    if cpu:
        threads = max(1, (os.cpu_count() or 1) // count)
        variables["ACCELERATE_USE_CPU"] = "true"
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    return variables


def end_with_launcher() -> None:
    """Send SIGTERM to this process once the launcher that started it is gone."""
    launcher = os.getppid()
    if os.environ.get(LAUNCHER) != str(launcher):
        return

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until all have ended; return the code of the first failure."""
    failed, code = 0.0, 0
    terminated = False
    while running := [process for process in processes if process.poll() is None]:
        codes = [process.returncode for process in processes if process.returncode]
        if codes and not code:
            failed, code = time.monotonic(), codes[0]
        late = time.monotonic() - failed if code else 0.0
        for process in running:
            if late > PATIENCE + SAVING:
                process.kill()
            elif late > PATIENCE and not terminated:
                process.terminate()
        terminated = late > PATIENCE
        time.sleep(0.1)
    code = code or next((p.returncode for p in processes if p.returncode), 0)
    return code if code >= 0 else 128 - code

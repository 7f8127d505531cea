"""The other processes of a run: collectives that wait with a timeout and name who is missing."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flowrl.errors import Interrupted, MachineFailure, current_phase
from flowrl.utils.stopping import stop_request

LOG = logging.getLogger(__name__)
POLL = 0.1  # seconds between looks for a signal
NOTICE = 15.0  # seconds of waiting between log lines
GRACE = 20.0  # seconds that a signal leaves for the others to come; launchers kill after 30


class Peers:
    """All processes of a run, and a gloo group for the messages that are not gradients.

    Args:
        timeout: seconds that one process may keep the others waiting.
    """

    def __init__(self, *, timeout: float):
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.meet()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes of a tensor on the CPU."""
        total = tensor.clone()
        self.call(dist.all_reduce, total, group=self._group)
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape and on the CPU, by rank."""
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        self.call(dist.all_gather, parts, tensor.contiguous(), group=self._group)
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor, on the CPU and of one shape on all."""
        received = tensor.clone()
        self.call(dist.broadcast, received, src=0, group=self._group)
        return received

    def call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call a collective once all processes are here; raises as `meet`."""
        self.meet()
        try:
            collective(*args, **options)
        except RuntimeError as error:  # one has ended since
            raise self._failure(str(error)) from error

    def meet(self) -> None:
        """Wait until all processes are here; collectives between them then take no time.

        Raises:
            MachineFailure: a process has ended, is frozen, or keeps the others waiting too long.
            Interrupted: a signal came, and the others do not.
        """
        barrier, began, noticed = self._barrier(), time.monotonic(), 0.0
        while True:  # the barrier waits in a thread, so that this one handles signals
            try:
                return barrier.result(POLL)
            except TimeoutError:
                waited, stop = time.monotonic() - began, stop_request()
            except RuntimeError as error:
                raise self._failure(str(error)) from error
            if min(waited, stop.seconds()) > GRACE:
                text = f"{stop.name} while it waited for the other processes"
                raise Interrupted(stop.number, text)
            if self.rank == 0 and waited - noticed > NOTICE:
                noticed = waited
                LOG.warning("waiting for the other processes, for %.0f s", waited)

    def _barrier(self) -> "Future[None]":
        future: Future[None] = Future()

        def wait() -> None:
            try:
                dist.monitored_barrier(
                    self._group, timedelta(seconds=self.timeout), wait_all_ranks=True
                )
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return future

    def _failure(self, text: str) -> MachineFailure:
        """Return the failure of a barrier. Only rank 0 knows which other rank is missing."""
        named = re.search(r"Ranks ([\d, ]+) failed to pass", text)
        ranks = [int(rank) for rank in named[1].split(",")] if named else [0]
        who = " and ".join(f"rank {rank}" for rank in ranks)
        note = "" if named else "; its own message may name another process"
        detail = (
            f"{who} has ended, is frozen, its link is cut, or it kept the others waiting for more "
            f"than runtime.timeout = {self.timeout:g} s{note}"
        )
        return MachineFailure("peer", detail, current_phase())


def meet(store: Any, rank: int, size: int) -> str:
    """Return a name that the processes of this attempt have, and none of an earlier one.

    torchrun keeps one store for all attempts, in which gloo would read the addresses of processes
    that have ended, and its restart count differs between machines. All processes call it together.
    """
    name = os.urandom(8).hex()
    if rank == 0:
        store.set("flowrl/meeting", name)
        answers = [f"flowrl/{name}/{peer}" for peer in range(1, size)]
        while answers and not store.check(answers):
            time.sleep(0.02)
        store.set(f"flowrl/{name}/met", ",".join(store.get(key).decode() for key in answers))
        return name
    answered = ""
    while True:
        meeting = store.get("flowrl/meeting").decode()  # perhaps still an earlier attempt's
        if meeting != answered:
            store.set(f"flowrl/{meeting}/{rank}", name)
            answered = meeting
        met = f"flowrl/{meeting}/met"
        if store.check([met]) and name in store.get(met).decode().split(","):
            return meeting
        time.sleep(0.02)

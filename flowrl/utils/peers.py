"""The other processes of a run: what they do now, and waiting for them with an end.

Each process writes a beat into the launcher's store every few seconds, from a thread: a number that
grows, how many messages it has taken part in, its phase, and why it left. So a process that waits
knows who is missing: one that is silent is frozen or cut off, one that beats is only slow.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.errors import Interrupted, MachineFailure, current_phase
from flowrl.utils.stopping import stop_request

LOG = logging.getLogger(__name__)
BEAT = 5.0  # seconds
TELL = 15.0  # seconds of waiting between log lines
GRACE = 20.0  # seconds that a signal leaves for the others to come; launchers kill after 30
LONG = timedelta(days=30)  # no timeout of the group itself: a wait ends by what beats say


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a process says of itself."""

    number: int  # grows with each beat
    messages: int  # it has taken part in so far
    phase: str  # "" outside of all
    seconds: float  # in that phase
    left: str = ""  # why it ended, "" while it is there


class Peers:
    """All processes of a run, and a gloo group for the messages that are not gradients.

    Args:
        peer_timeout: seconds without a beat after which a process is lost.
        answer_timeout: seconds that one may keep the others waiting while it beats.
    """

    def __init__(self, *, peer_timeout: float, answer_timeout: float):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.peer_timeout, self.answer_timeout = peer_timeout, answer_timeout
        self.group: Any = dist.new_group(backend="gloo", timeout=LONG)
        self.messages = 0
        self._left = ""
        self._told = 0.0
        self.holder = "the launcher" if agent_has_store() else "rank 0"
        self._heard: dict[int, tuple[float, Beat]] = {}  # time by time.monotonic
        self._missed: dict[int, int] = {}  # rounds in a row without a new beat; of this process's,
        self._round_at = time.monotonic()  # since one that was stopped itself has heard nothing
        self._wake, self._over = threading.Event(), threading.Event()
        self._number, self._said_left = 0, False
        # Launchers keep what earlier attempts have written, and count these on each machine apart.
        attempt = torch.tensor([int.from_bytes(os.urandom(7), "big")])
        self.wait(dist.broadcast(attempt, src=0, group=self.group, async_op=True), beats=False)
        self._store = dist.PrefixStore(f"flowrl/{attempt.item()}", launchers_store())
        self._say()
        start = torch.zeros(1)
        self.wait(dist.all_reduce(start, group=self.group, async_op=True), beats=False)
        self._hear()  # all have said something
        atexit.register(self.close)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    # --- waiting ------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes of a tensor on the CPU."""
        total = tensor.clone()
        self.wait(dist.all_reduce(total, group=self.group, async_op=True))
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape and on the CPU, by rank."""
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        self.wait(dist.all_gather(parts, tensor.contiguous(), group=self.group, async_op=True))
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor, on the CPU and of one shape on all."""
        found = tensor.clone()
        self.wait(dist.broadcast(found, src=0, group=self.group, async_op=True))
        return found

    def wait(self, work: Any, *, beats: bool = True) -> None:
        """Wait until all have taken part.

        Raises:
            MachineFailure: a process ended, is silent, or keeps the others waiting for too long.
            Interrupted: a signal came, and the others do not.
        """
        self.messages += 1
        waited, last, pause = 0.0, time.monotonic(), 2e-5
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()
            if now - last > 1.0:  # this process was stopped itself: that is nobody's silence
                self._round_at = now
            waited += min(now - last, 1.0)
            last = now
            if beats and waited > 0.5:
                self._check(waited)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._closed(error) from error
        self._told = 0.0

    def _check(self, waited: float) -> None:
        """Raise when there is nothing left to wait for."""
        stop = stop_request()
        if min(waited, stop.seconds()) > GRACE:
            raise Interrupted(stop.number, f"{stop.name} while it waited for {self._missing()}")
        now = time.monotonic()
        if told := self._told_why():
            raise told
        if now - self._round_at > self.peer_timeout:
            ranks = [0] if self.holder == "rank 0" else []
            raise _lost(
                ranks,
                f"{self.holder}, which keeps the beats of all processes, has not answered for "
                f"{now - self._round_at:.0f} s: it is frozen, or the link to it is cut",
            )
        if silent := [r for r, n in self._missed.items() if n * self.every() > self.peer_timeout]:
            raise _lost(
                silent,
                f"{self._describe(silent)}, silent for more than runtime.peer_timeout = "
                f"{self.peer_timeout:g} s: frozen, or the link is cut",
            )
        if waited > self.answer_timeout:
            raise _lost(
                self._behind(),
                f"all wait for {self._missing()}, for more than runtime.answer_timeout = "
                f"{self.answer_timeout:g} s",
            )
        if self.rank == 0 and waited - self._told > TELL:
            self._told = waited
            LOG.warning("waiting for %s, for %.0f s", self._missing(), waited)

    def _closed(self, error: RuntimeError) -> MachineFailure:
        """Return the failure of a connection that broke: the next beats tell whose."""
        before = {rank: beat.number for rank, (_, beat) in self._heard.items()}
        at, began = self._round_at, time.monotonic()
        self._wake.set()  # hear now what a process said when it left
        while self._round_at == at and time.monotonic() - began < 2.0:
            time.sleep(0.01)
        several = len(before) > 1
        while several and time.monotonic() - began < min(2 * BEAT + 1, self.peer_timeout):
            if self._told_why() or stop_request().name:  # or the launcher ends all
                break
            time.sleep(0.1)
        if told := self._told_why():
            return told
        heard = dict(self._heard)
        same = [rank for rank, (_, beat) in heard.items() if beat.number == before.get(rank)]
        ranks = same or list(before)
        reason = str(error).splitlines()[0]
        return _lost(ranks, f"{self._describe(ranks)}, has closed its connection ({reason})")

    def _told_why(self) -> MachineFailure | None:
        """Return the failure of a process that said why it ends; it saves what it can itself."""
        for rank, (_, beat) in dict(self._heard).items():
            if beat.left:
                return _lost([], f"rank {rank} has ended: {beat.left}")
        return None

    def _behind(self) -> list[int]:
        """Return the ranks that have not taken part in the message that this one waits for."""
        heard = dict(self._heard)
        return [rank for rank, (_, beat) in heard.items() if beat.messages < self.messages]

    def _missing(self) -> str:
        return self._describe(self._behind()) or "the others"

    def _describe(self, ranks: Collection[int]) -> str:
        """Return `rank 1 (in phase score (reward 'slow') for 12 s)` and so on."""
        now, parts = time.monotonic(), []
        for rank in ranks:
            at, beat = self._heard[rank]
            doing = f"in phase {beat.phase}" if beat.phase else "between phases"
            parts.append(f"rank {rank} ({doing} for {beat.seconds + now - at:.0f} s)")
        return ", ".join(parts)

    # --- beats --------------------------------------------------------------------------------

    def recent(self) -> list[int]:
        """Return the ranks that were heard of lately, this one included."""
        return sorted([self.rank, *(rank for rank, n in self._missed.items() if n < 3)])

    def every(self) -> float:
        """Return the seconds between beats."""
        return min(BEAT, self.peer_timeout / 4, self.answer_timeout / 4)

    def leave(self, why: str) -> None:
        """Tell the others that this process ends, and why."""
        self._left = why
        self._wake.set()
        # A launcher's store outlives this process; its own would take the sentence with it.
        until = time.monotonic() + 2 * self.every() + 1
        while time.monotonic() < until and not self._have_heard():
            time.sleep(0.05)
        self.close()

    def _have_heard(self) -> bool:
        if self.holder != "rank 0" or self.rank:
            return self._said_left
        return self._said_left and all(beat.left for _, beat in dict(self._heard).values())

    def close(self) -> None:
        self._over.set()
        self._wake.set()

    def _beat(self) -> None:
        try:
            while not self._over.is_set():
                self._wake.clear()
                self._say()
                self._hear()
                self._wake.wait(self.every())
        except (RuntimeError, ValueError):  # the store is gone: `_check` sees an old round
            return

    def _say(self) -> None:
        self._number += 1
        mark = current_phase()
        seconds = 0.0 if mark is None else time.monotonic() - mark.began
        left = self._left
        said = [self._number, self.messages, "" if mark is None else str(mark), seconds, left]
        self._store.set(str(self.rank), json.dumps(said))
        self._said_left = bool(left)

    def _hear(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank, text in zip(others, self._store.multi_get([*map(str, others)]), strict=True):
            number, messages, phase, seconds, left = json.loads(text)
            known = self._heard.get(rank)
            self._missed[rank] = self._missed.get(rank, 0) + 1
            if known is None or known[1].number != number:
                beat = Beat(
                    number=number, messages=messages, phase=phase, seconds=seconds, left=left
                )
                self._heard[rank], self._missed[rank] = (time.monotonic(), beat), 0
        self._round_at = time.monotonic()


def _lost(ranks: Collection[int], detail: str) -> MachineFailure:
    return MachineFailure("peer", detail, current_phase(), ranks=ranks)


def agent_has_store() -> bool:
    """Whether torch's launcher holds the store, which then outlives each process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launchers_store() -> Any:
    """Return the store that the launcher has told this process."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False)


def meet(store: Any, rank: int, size: int) -> str:
    """Return a name that the processes of this attempt have, and none of an earlier one.

    torchrun may keep one store for all attempts, in which gloo would find the addresses of
    processes that are gone. All processes call it together.
    """
    own = os.urandom(8).hex()
    if rank == 0:
        store.set("flowrl/meeting", own)
        answers = [f"flowrl/{own}/{other}" for other in range(1, size)]
        while answers and not store.check(answers):
            time.sleep(0.02)
        store.set(f"flowrl/{own}/met", ",".join(store.get(key).decode() for key in answers))
        return own
    answered = ""
    while True:
        name = store.get("flowrl/meeting").decode()  # perhaps still an earlier attempt's
        if name != answered:
            store.set(f"flowrl/{name}/{rank}", own)
            answered = name
        met = f"flowrl/{name}/met"
        if store.check([met]) and own in store.get(met).decode().split(","):
            return name
        time.sleep(0.02)

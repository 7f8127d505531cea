"""accelerate behind one class: processes, precision, gradients. Nothing else imports it."""

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowrl.errors import MachineFailure, UserError, as_failure
from flowrl.functional.batches import Batches
from flowrl.utils.peers import Peers, meet

TIMEOUT = 1800.0  # seconds that one process may keep the others waiting
# What launchers ask for by ACCELERATE_USE_..., and accelerate would wrap the network in.
WRAPPERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")


class Runtime:
    """One training process among `world_size`, launched by accelerate, torchrun or python.

    One call an update sums the adapter's small gradients instead of a wrapper of the network: the
    arithmetic of DistributedDataParallel, and adapters can be switched and merged freely. Raises
    UserError for a missing device, a process that already computes in another precision, and what
    a launcher asks for in vain: see `_check_launcher`.

    Args:
        timeout: see `Peers`.
        seed: see `seed`.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        mixed_precision: str = "no",
        timeout: float = TIMEOUT,
        seed: int = 0,
    ):
        from accelerate import Accelerator

        _check_launcher()
        self.seed(seed)
        on_cpu = device == "cpu" or device == "auto" and _is_on("ACCELERATE_USE_CPU")
        _join_attempt(on_cpu)
        try:
            self.accelerator = Accelerator(cpu=on_cpu, mixed_precision=mixed_precision)
        except ValueError as error:  # accelerate keeps one state a process
            raise UserError(
                "accelerate cannot change this process's device, or its precision to "
                f"{mixed_precision!r}: start a new process"
            ) from error
        self.device: torch.device = self.accelerator.device
        if self.device.type == "cuda":
            # torch's first choice on Hopper since 2.11. Its backward pass fails for FLUX.1 on an
            # H100, or gives NaN (pytorch issue 196678). `pipeline.attention` can still name it.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.in_lockstep = False  # networks are sharded: all processes call them equally often
        self.batches = Batches(self.rounds)
        if device not in ("auto", self.device.type):
            raise UserError(
                f"pipeline.device is {device}, but torch finds no such device here: set it to auto"
            )
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and self.world_size == 1:
            raise UserError(
                f"the launcher started {started} processes, but accelerate sees a single one, and "
                "each would train alone: set pipeline.device=cpu to train on CPUs, or start one "
                "process"
            )
        self.peers = _peers(timeout) if self.world_size > 1 else None  # None for a process alone

    def seed(self, seed: int, iteration: int = 0) -> None:
        """Seed Python's, NumPy's and torch's global generators.

        flowrl draws keyed noise and uses none of them, but a reward or a library may.
        """
        from accelerate.utils import set_seed

        set_seed((seed + 1_000_003 * iteration) % 2**32)  # NumPy takes no more

    @property
    def idle_gpus(self) -> int:
        """The number of this machine's GPUs that no process of the run has."""
        if self.device.type != "cuda":
            return 0
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return max(0, torch.cuda.device_count() - processes)

    @property
    def gpu(self) -> int | None:
        """The number of this process's GPU, None without CUDA. New threads begin at number 0."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def prepare(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def local_rows(self, total: int, unit: int = 1) -> Tensor:
        """Split range(total) over processes in order; blocks of `unit` rows stay together.

        -> this process's rows (n,) long; processes differ by at most one block.
        """
        blocks = torch.arange(total).view(-1, unit)
        return blocks.tensor_split(self.world_size)[self.rank].flatten()

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes in order, on the device of `rows`; counts may differ."""
        if self.peers is None:
            return rows
        counts = [int(n) for n in self.peers.gather(torch.tensor([len(rows)]))]
        # bool has no all_gather on every back end; rows are padded to one length for it.
        padded = torch.zeros(max(counts), *rows.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows.cpu()
        parts = self.peers.gather(padded.byte() if rows.dtype == torch.bool else padded)
        parts = [part[:n] for part, n in zip(parts, counts, strict=True)]
        return torch.cat(parts).to(device=rows.device, dtype=rows.dtype)

    def merge(self, texts: dict[str, str]) -> dict[str, str]:
        """Return the texts of all processes by name, sent as JSON: nothing is unpickled."""
        if self.world_size == 1:
            return texts
        line = torch.frombuffer(bytearray((json.dumps(texts) + "\n").encode()), dtype=torch.uint8)
        lines = bytes(self.gather(line).tolist()).decode().splitlines()
        return {name: text for line in lines for name, text in json.loads(line).items()}

    def from_main(self, read: Callable[[], bytes]) -> bytes:
        """Return on every process what `read` returns on the main one, which alone calls it.

        So that a run needs no disk that all processes see. Raises its UserError on all.
        """
        data = b""
        with self.raise_on_all():
            if self.is_main:
                data = read()
        if self.peers is None:
            return data
        buffer = torch.zeros(int(self.sum(float(len(data)))), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self.peers.broadcast(buffer).numpy().tobytes()

    def same_as_main(self, tensor: Tensor) -> Tensor:
        """Return the main process's tensor on the device; a tensor on meta gives its shape."""
        from accelerate.utils import broadcast

        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if not tensor.is_meta:
            made.copy_(tensor)
        return broadcast(made)  # type: ignore[return-value]

    @contextmanager
    def raise_on_all(self, *, at_once: bool = False) -> Iterator[None]:
        """If one process raises UserError in the block, raise it on all.

        Otherwise the others would wait for it. What the machine fails at is such an error, too.
        The block must not communicate; or else it is raised at once, and the others are lost.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = as_failure(error)
            if failure is None or at_once:
                raise
        try:
            if not self.any(failure is not None):
                return
            where = (
                f"rank {self.rank}: " if isinstance(failure, MachineFailure) and self.peers else ""
            )
            text = {} if failure is None else {f"{self.rank:06d}": f"{where}{failure}"}
            message = min(self.merge(text).items())[1]
        except MachineFailure as lost:  # its own is the first cause
            raise failure or lost from None
        if failure is not None and text.get(f"{self.rank:06d}") == message:
            failure.args = (message,)  # with the rank, as the others say it
            raise failure
        raise UserError(message)

    def sum(self, value: float) -> float:
        """Return the sum of one number over processes."""
        if self.peers is None:
            return value
        return self.peers.sum(torch.tensor(value, dtype=torch.float64)).item()

    def mean_of_all(self, values: Tensor, *, counted: bool = True) -> Tensor:
        """Return the mean of one value a row (N,) over the rows of all processes that count. ()"""
        if self.peers is None:
            return values.mean()
        part = torch.tensor([values.double().sum().item(), len(values)], dtype=torch.float64)
        total, rows = self.peers.sum(part if counted else torch.zeros_like(part))
        return (total / rows).to(values)

    def rounds(self, count: int) -> int:
        """Return how often all processes do what this one has to do `count` times.

        The most of any process where they work in lockstep, else the count itself.
        """
        return self.most(count) if self.in_lockstep else count

    def most(self, count: int) -> int:
        """Return the largest number of all processes."""
        return int(self.gather(torch.tensor([count])).max())

    def largest_share(self, total: int, unit: int = 1) -> int:
        """Return the most rows that `local_rows` gives to a process."""
        return -(-(total // unit) // self.world_size) * unit

    def any(self, flag: bool) -> bool:
        """Return True on every process if it is on one, so that all stop together."""
        return self.sum(float(flag)) > 0

    @property
    def scales_gradients(self) -> bool:
        """Whether an fp16 scaler skips steps whose gradient is not finite."""
        return self.accelerator.scaler is not None

    def autocast(self):
        return self.accelerator.autocast()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of all processes, in one call. A process without rows counts as 0."""
        if self.peers is None:
            return
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.accelerator.scaler is not None:  # which must have scaled something, rows or none
            self.accelerator.scaler.scale(torch.zeros((), device=self.device))
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        self.peers.call(dist.all_reduce, flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip the gradient to `max_norm`; return its norm before."""
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm)
        return float(norm) if norm is not None else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the fp16 gradient scaler's state; empty in other precisions."""
        scaler = self.accelerator.scaler
        return scaler.state_dict() if scaler is not None else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state)

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.sum(0.0)


@functools.cache
def _peers(timeout: float) -> Peers:
    """Return the processes that the launcher started, with one group for all runtimes."""
    return Peers(timeout=timeout)


def _join_attempt(on_cpu: bool) -> None:
    """Join the processes of this attempt, where torchrun may start them again after a failure."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized() or not (restarts and shared):
        return
    if not on_cpu and not torch.cuda.is_available():
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    prefixed = dist.PrefixStore(meet(store, rank, size), store)
    backend = "gloo" if on_cpu else "nccl"
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size)


def _check_launcher() -> None:
    """Raise UserError for what a launcher asks for and flowrl does otherwise, or not at all.

    Gradient accumulation would divide the loss a second time; wrappers would be ignored.
    """
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        raise UserError(
            "the launcher sets gradient accumulation: set it to 1 there and use "
            "optim.micro_batch, which flowrl accumulates itself"
        )
    for name in WRAPPERS:
        if _is_on(f"ACCELERATE_USE_{name}"):
            raise UserError(
                f"the launcher asks for {name}, which flowrl does not use: only the "
                "adapter is trained, and each process holds the frozen weights. Launch with "
                "--multi_gpu, and see docs/memory.md for what needs less memory"
            )


def _is_on(name: str) -> bool:
    """Return whether a variable of the environment says yes, as accelerate reads it."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "on")


class Postponed:
    """Keeps the first UserError of several blocks until `finish`, where processes are in lockstep.

    The others would wait forever for the network's calls of one that stops half-way. Where they are
    not, errors are raised at once.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._first: UserError | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if not self.runtime.in_lockstep:
                raise
            self._first = self._first or error

    def finish(self) -> None:
        if self._first is not None:
            raise self._first

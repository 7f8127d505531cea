"""accelerate behind one class: processes, precision, gradients. Nothing else imports it."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.errors import UserError


class Runtime:
    """One training process among `world_size`, launched by accelerate, torchrun or python.

    One call an update sums the adapter's small gradients instead of a wrapper of the network: the
    arithmetic of DistributedDataParallel, and adapters can be switched and merged freely. Raises
    UserError for a missing device, a process that already computes in another precision, and a
    launcher with gradient accumulation, which would divide the loss a second time.
    """

    def __init__(self, *, device: str = "auto", mixed_precision: str = "no"):
        from accelerate import Accelerator

        if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
            raise UserError(
                "the launcher sets gradient accumulation: set it to 1 there and use "
                "optim.micro_batch, which flowrl accumulates itself"
            )
        try:
            self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=mixed_precision)
        except ValueError as error:  # accelerate keeps one state a process
            raise UserError(
                "accelerate cannot change this process's device, or its precision to "
                f"{mixed_precision!r}: start a new process"
            ) from error
        self.device: torch.device = self.accelerator.device
        if device not in ("auto", self.device.type):
            raise UserError(
                f"pipeline.device is {device}, but torch finds no such device here: set it to auto"
            )

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
        if self.world_size == 1:
            return rows
        count = torch.tensor([len(rows)], device=self.device)
        counts = self._gather(count).tolist()
        # bool has no all_gather on every back end; rows are padded to one length for it.
        padded = torch.zeros(max(counts), *rows.shape[1:], device=self.device, dtype=rows.dtype)
        padded[: len(rows)] = rows.to(self.device)
        parts = self._gather(padded.byte() if rows.dtype == torch.bool else padded)
        kept = [p[:n] for p, n in zip(parts.split(max(counts)), counts, strict=True)]
        return torch.cat(kept).to(device=rows.device, dtype=rows.dtype)

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
        if self.world_size == 1:
            return data
        from accelerate.utils import broadcast

        found = torch.zeros(int(self.sum(float(len(data)))), dtype=torch.uint8)
        if data:
            found.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        shared: Tensor = broadcast(found.to(self.device))  # type: ignore[assignment]
        return shared.cpu().numpy().tobytes()

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """If one process raises UserError in the block, raise it on all.

        Otherwise the others would wait for it forever. The block must not communicate.
        """
        failure = None
        try:
            yield
        except UserError as error:
            failure = error
        if not self.any(failure is not None):
            return
        own = {} if failure is None else {f"{self.rank:06d}": str(failure)}
        message = min(self.merge(own).items())[1]
        if failure is not None and str(failure) == message:
            raise failure
        raise UserError(message)

    def _gather(self, tensor: Tensor) -> Tensor:
        return self.accelerator.gather(tensor)  # type: ignore[return-value]

    def sum(self, value: float) -> float:
        """Return the sum of one number over processes."""
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(total, "sum").item()  # type: ignore[union-attr]

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
        if self.world_size == 1:
            return
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.accelerator.scaler is not None:  # which must have scaled something, rows or none
            self.accelerator.scaler.scale(torch.zeros((), device=self.device))
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        total: Tensor = self.accelerator.reduce(flat, "sum")  # type: ignore[assignment]
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
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
        self.accelerator.wait_for_everyone()

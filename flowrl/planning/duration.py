"""How long a recipe takes: the arithmetic of its networks, by the rate of a card or machine."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowrl.planning.activations import count_decode, count_forward
from flowrl.planning.memory import MemorySetup, forward_of
from flowrl.planning.model_specs import ModelSpec

# Operations a second in forwards of transformers in 16 bits, by the name of the card, as
# `python -m scripts.bench certify` measured them on it. None has been measured yet.
RATES: Mapping[str, float] = {}
MEASURED_SECONDS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The work of a recipe in operations, and how long it takes where a rate is known."""

    iteration: float  # operations of the first iteration, on all GPUs together
    run: float  # the same of all iterations and evaluations
    gpus: int
    rate: float | None = None  # operations a second of one GPU
    rate_of: str = ""  # whose rate

    @property
    def seconds(self) -> float | None:
        """Return the seconds of an iteration."""
        return None if self.rate is None else self.iteration / self.rate / self.gpus

    @property
    def hours(self) -> float | None:
        """Return the hours of the run."""
        return None if self.rate is None else self.run / self.rate / self.gpus / 3600

    def cost(self, price: float) -> float | None:
        """Return the run's cost, for a price of one GPU and one hour."""
        return None if self.hours is None else self.hours * self.gpus * price


def known_rate() -> tuple[float | None, str]:
    """Return the operations a second of the card that is here, if it is known, and its name."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return RATES.get(card), card if card in RATES else ""


def measured_rate(dtype: torch.dtype) -> tuple[float, str]:
    """Time a product of matrices on this machine; return operations a second, and whose they are.

    A whole network is slower: norms and attention take their share.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "this machine's CPU"
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, dtype=dtype, device=device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < MEASURED_SECONDS:
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(taken[1:]), f"{name}, at most"


def forward_operations(spec: ModelSpec, setup: MemorySetup) -> float:
    """Return the multiplications and additions of one image's forward, with the adapter's."""
    rows = setup.rollout_batch * (1 + setup.rollout_doubles)
    return count_forward(forward_of(spec, setup, rows), gradients=False).operations / rows


def decode_operations(spec: ModelSpec, setup: MemorySetup) -> float:
    """Return the multiplications and additions of decoding one latent."""
    size = setup.decode_batch, setup.height, setup.width, setup.torch_dtype
    return count_decode(spec, *size).operations / setup.decode_batch

"""How long a recipe takes: the arithmetic of its networks, by the rate of a card or machine."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Operations a second in forwards of transformers in 16 bits, by the name of the card, as
# `python -m scripts.bench certify` measured them on it, with compiled blocks and with plain ones.
# On the H100: SD3.5-Medium at 512 pixels.
RATES: Mapping[tuple[str, bool], float] = {
    ("NVIDIA H100 80GB HBM3", True): 334e12,
    ("NVIDIA H100 80GB HBM3", False): 166e12,
}
MEASURED_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class PublishedGPU:
    """A GPU as its maker publishes it."""

    memory: int  # bytes
    peak: float  # operations a second: dense bf16 matrix products, summed in fp32
    source: str


# The peaks that data sheets print "with sparsity" are halved. Figures agree with secondary tables
# of November 2026, but for those of the RTX 4070 Ti and 5090, which were not compared; the
# documents named as sources were not opened.
CARDS: Mapping[str, PublishedGPU] = {
    "GeForce RTX 4070 Ti": PublishedGPU(12 * 10**9, 80.2e12, "Ada architecture white paper 2.1"),
    "GeForce RTX 4080": PublishedGPU(16 * 10**9, 97.5e12, "Ada architecture white paper 2.1"),
    "GeForce RTX 3090": PublishedGPU(24 * 10**9, 71e12, "Ampere GA102 white paper 2.0"),
    "GeForce RTX 4090": PublishedGPU(24 * 10**9, 165.2e12, "Ada architecture white paper 2.1"),
    "GeForce RTX 5090": PublishedGPU(32 * 10**9, 209.5e12, "RTX Blackwell white paper 1.1"),
    "L40S": PublishedGPU(48 * 10**9, 362e12, "L40S data sheet"),
    "A100 80GB": PublishedGPU(80 * 10**9, 312e12, "A100 data sheet"),
    "H100 SXM": PublishedGPU(80 * 10**9, 989e12, "H100 data sheet"),
    "H200": PublishedGPU(141 * 10**9, 989e12, "H200 data sheet"),
    "B200": PublishedGPU(180 * 10**9, 2250e12, "Blackwell architecture brief"),
    "Instinct MI300X": PublishedGPU(192 * 10**9, 1307e12, "MI300X data sheet"),
}
# Shares of the peak that whole networks reach in training, at most and at least, by whether their
# blocks are compiled: an assumption around the one card that was measured, an H100, where forwards
# reach 0.34 and 0.17, and learning about 0.8 of that.
SHARES: Mapping[bool, tuple[float, float]] = {True: (0.5, 0.25), False: (0.25, 0.12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The work of a recipe in operations, and how long it takes where a rate is known."""

    iteration: float  # operations of the first iteration, on all GPUs together
    run: float  # the same of all iterations and evaluations
    gpus: int
    compiled: bool  # pipeline.compile
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

    def estimates(self, memory: int) -> dict[str, tuple[float, float]]:
        """Return the run's fewest and most hours by the name of each card that holds `memory`."""
        most, least = SHARES[self.compiled]
        hours = {
            name: self.run / card.peak / self.gpus / 3600
            for name, card in CARDS.items()
            if card.memory >= memory
        }
        return {name: (full / most, full / least) for name, full in hours.items()}


def certified_rate(compiled: bool) -> tuple[float | None, str]:
    """Return the operations a second of the card that is here, if it is known, and its name."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    rate = RATES.get((card, compiled))
    return rate, card if rate else ""


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

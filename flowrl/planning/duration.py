"""How long a recipe takes: the arithmetic of its networks, by the peaks of cards."""

from collections.abc import Mapping
from dataclasses import dataclass


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
# reach 0.34 to 0.44 and 0.17 to 0.18, and learning about 0.8 of that.
SHARES: Mapping[bool, tuple[float, float]] = {True: (0.5, 0.25), False: (0.25, 0.12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The work of a recipe in operations, and how long it takes."""

    iteration: float  # operations of the first iteration, on all GPUs together
    run: float  # the same of all iterations and evaluations
    gpus: int
    compiled: bool  # pipeline.compile

    def estimates(self, memory: int) -> dict[str, tuple[float, float]]:
        """Return the run's fewest and most hours by the name of each card that holds `memory`."""
        most, least = SHARES[self.compiled]
        hours = {
            name: self.run / card.peak / self.gpus / 3600
            for name, card in CARDS.items()
            if card.memory >= memory
        }
        return {name: (full / most, full / least) for name, full in hours.items()}

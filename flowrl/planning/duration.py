"""How long a recipe takes: the arithmetic of its networks, by the rate of a card or machine."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowrl.planning.activations import (
    EqualCallsOnce,
    Forward,
    autocast,
    block_counts,
    transformer_inputs,
    with_block_counts,
)
from flowrl.planning.memory import MemorySetup
from flowrl.planning.model_specs import ModelSpec, build_network, randomise

# Operations a second in forwards of transformers in 16 bits, by the name of the card, as
# `python -m scripts.bench certify` measured them on it. None has been measured yet.
RATES: Mapping[str, float] = {}
SHORT = 2  # blocks of each kind whose operations are counted; every further one adds as much
MEASURED_SECONDS = 2.0  # of forwards on this machine, at least one after the first


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


def measured_rate(spec: ModelSpec, setup: MemorySetup) -> tuple[float, str]:
    """Time forwards of a short network with random weights here; return their rate, and whose."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "this machine's CPU"
    one = replace(forward_of(spec, setup), rows=setup.rollout_batch if device.type == "cuda" else 1)
    short = {kind: min(n, SHORT) for kind, n in block_counts(spec.config).items()}
    network = _network(one, short).to_empty(device=device)
    randomise(network, seed=0)
    inputs = {
        key: torch.zeros(t.shape, dtype=t.dtype, device=device)
        for key, t in transformer_inputs(one).items()
    }
    return _operations(one, short) / _seconds(network, inputs, device), f"{name}, measured now"


@torch.no_grad()
def _seconds(network: nn.Module, inputs: dict[str, Any], device: torch.device) -> float:
    """Return the median seconds of a forward, after a first one."""
    taken: list[float] = []
    while len(taken) < 2 or sum(taken[1:]) < MEASURED_SECONDS:
        began = time.perf_counter()
        network(**inputs, return_dict=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def forward_of(spec: ModelSpec, setup: MemorySetup) -> Forward:
    """Return a forward of one image."""
    return Forward(
        spec=spec, rows=1, height=setup.height, width=setup.width, text_tokens=setup.text_tokens,
        dtype=setup.torch_dtype, rank=setup.rank, targets=setup.targets,
    )  # fmt: skip


@lru_cache(maxsize=16)
def forward_operations(forward: Forward) -> float:
    """Return the multiplications and additions of a forward, without the adapter's few."""
    full = block_counts(forward.spec.config)
    short = {kind: min(n, SHORT) for kind, n in full.items()}
    found = base = _operations(forward, short)
    for kind, n in full.items():
        if n > short[kind]:
            longer = _operations(forward, short | {kind: short[kind] + 1})
            found += (n - short[kind]) * (longer - base)
    return found


@lru_cache(maxsize=16)
def decode_operations(forward: Forward) -> float:
    """Return the multiplications and additions of decoding a latent."""
    spec = forward.spec
    network: Any = build_network(spec.autoencoder, spec.autoencoder_config, forward.dtype)
    h, w = forward.height // spec.factor, forward.width // spec.factor
    z = torch.empty((1, spec.channels, h, w), dtype=forward.dtype, device="meta")
    with _counted(forward) as counter:
        network.decode(z, return_dict=False)
    return counter.get_total_flops()


def _operations(forward: Forward, counts: Mapping[str, int]) -> float:
    network, inputs = _network(forward, counts), transformer_inputs(forward)
    with _counted(forward) as counter:
        network(**inputs, return_dict=False)
    return counter.get_total_flops()


@contextmanager
def _counted(forward: Forward) -> Iterator[FlopCounterMode]:
    counter = FlopCounterMode(display=False)
    with EqualCallsOnce(), counter, autocast(forward.dtype), torch.no_grad():
        yield counter


def _network(forward: Forward, counts: Mapping[str, int]) -> nn.Module:
    spec = forward.spec
    return build_network(spec.transformer, with_block_counts(spec.config, counts), forward.dtype)

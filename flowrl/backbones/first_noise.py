"""Begin a pipeline's call near other noise: the local search over first noises of 2501.09732."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def noise_near(pipeline: Any, seeds: Sequence[int], share: float) -> Iterator[None]:
    """Begin the calls inside the block with a mixture of the noises of several seeds.

    Each seed's noise z' moves what those before it made: z <- sqrt(1 - share^2) z + share z', which
    is standard normal, too. A pipeline lays out its latents linearly, so that what it prepares from
    each seed is mixed.

    Args:
        share: in [0, 1]; 0 is the first seed's noise and 1 the last one's.
    """
    prepare = pipeline.prepare_latents

    @functools.wraps(prepare)
    def prepare_mixed(*args: Any, **kwargs: Any) -> Any:
        mixed, rest = None, None
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            here = [draw if isinstance(value, torch.Generator) else value for value in args]
            named = {k: draw if isinstance(v, torch.Generator) else v for k, v in kwargs.items()}
            prepared = prepare(*here, **named)
            z, *rest = prepared if isinstance(prepared, tuple) else (prepared,)
            mixed = z if mixed is None else math.sqrt(1 - share**2) * mixed + share * z
        return (mixed, *rest) if rest else mixed

    pipeline.prepare_latents = prepare_mixed
    try:
        yield
    finally:
        del pipeline.prepare_latents

"""Begin a pipeline's call near other noise: the local search over first noises of 2501.09732."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flowrl.errors import UserError


@contextmanager
def noise_near(pipeline: Any, seeds: Sequence[int], share: float) -> Iterator[None]:
    """Begin the calls inside the block with a mixture of the noises of several seeds.

    Each seed's noise z' moves what those before it made: z <- sqrt(1 - share^2) z + share z', which
    is standard normal, too. A pipeline lays out its latents linearly, so that what it prepares from
    each seed is mixed.

    Args:
        pipeline: of diffusers; its call gets one generator, which the seeds take the place of.
        seeds: one or more.
        share: in [0, 1]; 0 is the first seed's noise and 1 the last one's.

    Raises UserError for a pipeline that does not prepare its latents in a method of its own.
    """
    prepare = getattr(pipeline, "prepare_latents", None)
    if prepare is None:
        raise UserError(
            f"{type(pipeline).__name__} has no prepare_latents, whose noise --near mixes: leave it "
            "out, and all seeds are tried independently"
        )

    @functools.wraps(prepare)
    def prepare_mixed(*args: Any, **kwargs: Any) -> Any:
        mixed: Any = None
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            here = [draw if isinstance(value, torch.Generator) else value for value in args]
            named = {k: draw if isinstance(v, torch.Generator) else v for k, v in kwargs.items()}
            prepared = prepare(*here, **named)
            z, *rest = prepared if isinstance(prepared, tuple) else (prepared,)
            part = z.float()  # half precision would round at every seed
            mixed = part if mixed is None else math.sqrt(1 - share**2) * mixed + share * part
            dtype = z.dtype
        return (mixed.to(dtype), *rest) if rest else mixed.to(dtype)

    pipeline.prepare_latents = prepare_mixed
    try:
        yield
    finally:
        del pipeline.prepare_latents

"""Linear layers with nothing between them, as published predictors end: a vector to one number."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

from .loading import building


def linear_head(
    state: Mapping[str, Tensor],
    path: Path,
    *,
    what: str,
    widths: Sequence[int],
    prefix: str,
    numbers: Sequence[int],
) -> nn.Sequential:
    """Return the head of a file: float32, on the CPU, without gradients of its own.

    widths: of the vector, between the layers, and 1. numbers: of the layers in the file, where
    dropout has numbers of its own; `{prefix}{number}.weight` and `.bias`. Raises ValueError of one
    sentence where a layer is missing or has another shape.
    """
    with building():
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    head = nn.Sequential(*layers).requires_grad_(False)
    wanted = {
        f"{i}.{part}": f"{prefix}{number}.{part}"
        for i, number in enumerate(numbers)
        for part in ("weight", "bias")
    }
    try:
        head.load_state_dict({key: state[name] for key, name in wanted.items()})
    except (KeyError, RuntimeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{path} holds no {what} of widths {'-'.join(map(str, widths))}: {said}"
        ) from error
    return head

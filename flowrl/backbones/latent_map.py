"""The way from a pipeline's latents to its autoencoder's input, measured, and back."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.errors import UserError


def inverse_of(
    forward: Callable[[Tensor], Tensor], latent_shape: tuple[int, ...], device: torch.device
) -> tuple[torch.Size, Callable[[Tensor], Tensor]]:
    """Measure z = factor * x[place] + shift by latents of zeros, of ones and of codes 1, 2, 3, ...

    Packing, scaling, statistics and frame axes are all of this form.

    Args:
        forward: Turns latents x (1, *latent) fp32 into the autoencoder's input z (1, ...).

    Returns:
        The shape of z without the batch axis, and a function that turns z (B, ...) into
        x (B, *latent) fp32.

    Raises:
        UserError: Numbers are mixed, or get lost, so that there is no way back.
    """
    zeros = torch.zeros(1, *latent_shape, device=device)
    codes = torch.arange(1.0, zeros.numel() + 1, device=device).view_as(zeros)
    at_zero, at_one, at_codes = (forward(x).float() for x in (zeros, torch.ones_like(zeros), codes))
    shift, factor = at_zero.flatten(), (at_one - at_zero).flatten()
    place = ((at_codes.flatten() - shift) / factor).round().nan_to_num().long() - 1
    complete = place.sort().values
    if not torch.equal(complete, torch.arange(zeros.numel(), device=device)):
        raise UserError(
            "images cannot be turned into latents of this pipeline: its way from latents to "
            "the autoencoder mixes numbers"
        )

    def back(z: Tensor) -> Tensor:
        flat = (z.float().flatten(1) - shift) / factor
        return torch.empty_like(flat).index_copy_(1, place, flat).unflatten(1, latent_shape)

    return at_zero.shape[1:], back

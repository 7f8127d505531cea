"""The way from a pipeline's latents to its autoencoder's input, measured, and back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMap:
    """z = factor * x[place] + shift: packing, scaling, statistics and frame axes are all of it."""

    place: Tensor  # (n,) long, for each number of z that of x
    factor: Tensor  # (n,) fp32
    shift: Tensor  # (n,) fp32
    shape: tuple[int, ...]  # of z, without the batch axis
    latent_shape: tuple[int, ...]  # of x, without the batch axis

    @staticmethod
    def measure(
        forward: Callable[[Tensor], Tensor], latent_shape: tuple[int, ...], device: torch.device
    ) -> "LatentMap":
        """Measure the way by latents of zeros, of ones and of codes 1, 2, 3, ...

        Args:
            forward: Turns latents (1, *latent) fp32 into the autoencoder's input (1, ...).

        Raises:
            UserError: Numbers are mixed, or get lost, so that there is no way back.
        """
        zeros = torch.zeros(1, *latent_shape, device=device)
        codes = torch.arange(1.0, zeros.numel() + 1, device=device).view_as(zeros)
        at_zero, at_one, at_codes = (
            forward(x).float() for x in (zeros, torch.ones_like(zeros), codes)
        )
        shift, factor = at_zero.flatten(), (at_one - at_zero).flatten()
        place = ((at_codes.flatten() - shift) / factor).round().nan_to_num().long() - 1
        complete = place.sort().values
        if not torch.equal(complete, torch.arange(zeros.numel(), device=device)):
            raise UserError(
                "images cannot be turned into latents of this pipeline: its way from latents to "
                "the autoencoder mixes numbers"
            )
        return LatentMap(
            place=place, factor=factor, shift=shift, shape=tuple(at_zero.shape[1:]),
            latent_shape=latent_shape,
        )  # fmt: skip

    def back(self, z: Tensor) -> Tensor:
        """Return the latents (B, *latent) fp32 of inputs of the autoencoder (B, ...)."""
        flat = (z.float().flatten(1) - self.shift) / self.factor
        return (
            torch.empty_like(flat).index_copy_(1, self.place, flat).unflatten(1, self.latent_shape)
        )

"""The first stage of the pretraining: an autoencoder, and the latents that the flow learns."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.utils.files import load_state, save_state
from scripts.pretrain_tiny.fit import Track, fit, generator_at, plain_track

VAE_DECAY = 0.3  # last share of the steps, of falling learning rate
KL_WEIGHT = 5e-4
DC_NOISE = 0.1  # standard deviation
EDGE_WEIGHT = 0.5


def to_tensor(images: np.ndarray) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W) float32 in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


def posterior_of(vae: Any, x: Tensor) -> Any:
    """The Gaussian of latents of x (B, 3, H, W): an AutoencoderKL's own.

    An AutoencoderDC gives one latent; learning with some noise around it makes it smooth.
    """
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    encoded = vae.encode(x)
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist
    spread = torch.full_like(encoded.latent, 2 * math.log(DC_NOISE))
    return DiagonalGaussianDistribution(torch.cat([encoded.latent, spread], 1))


def fit_autoencoder(
    vae: Any, images: np.ndarray,
    *, steps: int, seed: int, folder: Path, batch: int = 16, track: Track = plain_track,
) -> None:  # fmt: skip
    """L1 + L2, the same on neighbouring differences (letters need edges), and a light KL."""
    vae.to(memory_format=torch.channels_last)
    device = device_of(vae)

    def loss_at(step: int) -> Tensor:
        generator = generator_at(seed, step)
        rows = torch.randint(len(images), (batch,), generator=generator)
        x = to_tensor(images[rows.numpy()]).to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            posterior = posterior_of(vae, x)
            y = vae.decode(posterior.sample(generator)).sample
        y = y.float()
        loss = F.l1_loss(y, x) + F.mse_loss(y, x)
        loss = loss + EDGE_WEIGHT * sum(
            F.l1_loss(a, b) for a, b in zip(edges(y), edges(x), strict=True)
        )
        return loss + KL_WEIGHT * posterior.kl().float().mean() / posterior.mean[0].numel()

    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-3)
    fit(
        "vae",
        vae,
        [optimizer],
        loss_at,
        steps=steps,
        decay=VAE_DECAY,
        folder=folder,
        track=track,
    )


def _encode(vae: Any, images: np.ndarray) -> Tensor:
    return posterior_of(vae, to_tensor(images).to(device_of(vae))).mean.cpu()


@torch.no_grad()
def normalise_latents(vae: Any, images: np.ndarray) -> None:
    """Set the VAE's shift and scale so that normalised latents have mean 0 and deviation 1."""
    z = torch.cat([_encode(vae, part) for part in np.array_split(images[:2048], 32)])
    if "shift_factor" in vae.config:  # an AutoencoderDC has none
        vae.register_to_config(shift_factor=round(z.mean().item(), 4))
    vae.register_to_config(scaling_factor=round(1 / z.std().item(), 4))


@torch.no_grad()
def encode_all(vae: Any, images: np.ndarray, path: Path) -> Tensor:
    """Normalised latents of every image, (count, C, h, w) float16, cached in `path`.

    Raises UserError when `path` holds those of another number of images.
    """
    if not path.exists():
        parts = [_encode(vae, part) for part in np.array_split(images, len(images) // 64)]
        shift = vae.config.get("shift_factor") or 0.0
        latents = (torch.cat(parts) - shift) * vae.config.scaling_factor
        save_state(path, {"latents": latents.half()})
    latents = load_state(path)["latents"]
    if len(latents) != len(images):
        raise UserError(f"{path} holds {len(latents)} images, not {len(images)}: delete it")
    return latents

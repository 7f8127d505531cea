"""Pretraining of the tiny pipelines: draw, learn the autoencoder, learn the flow.

Each stage is a deterministic function of a seed and its step number, saves its state every few
minutes and continues where it stopped, so the script can be killed at any time. What differs
between backbones (the transformer, the text encoders, how a prompt becomes conditioning) is a
`TinyModel` of `sd3.py`; this file knows none of it.
"""

import math
import random
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.storage import atomic_path, load_state, save_state
from flowrl.tiny.draw import draw
from flowrl.tiny.fit import Track, decay_start, fit, plain_track
from flowrl.tiny.world import TAGS, Prompt, split_prompts

SHARES = {  # how often each kind is drawn
    "single_object": 1.0, "two_object": 1.5, "counting": 2.5, "colors": 2.5,
    "position": 2.5, "color_attr": 3.5, "ocr": 1.5,
}  # fmt: skip
DROPOUT = 0.1  # share of captions replaced by "", for classifier-free guidance
MISLABELLED = 0.2  # share of captions of another picture, while the flow's learning rate falls
VAE_DECAY, FLOW_DECAY = 0.3, 0.15  # last share of a stage's steps, of falling learning rate
KL_WEIGHT = 5e-4
DC_NOISE = 0.1  # standard deviation
EDGE_WEIGHT = 0.5


class TinyModel(Protocol):
    """What the flow stage needs of a backbone: one module with every trained part inside."""

    short: int  # text tokens of the presets
    long: int  # text tokens of diffusers' default

    @property
    def module(self) -> nn.Module:
        """All that is trained."""
        ...

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Token ids of every prompt at the longest text length: {name: (P, length)} long."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, ids: dict[str, Tensor], length: int) -> Tensor:
        """Velocity at x (B, *latent), sigma (B,), for prompts `ids` cut to `length` tokens."""
        ...


# --- pictures ---------------------------------------------------------------------------------


def _example(seed: int, index: int) -> tuple[Prompt, random.Random]:
    rng = random.Random(f"{seed}/{index}")
    tag = rng.choices(TAGS, [SHARES[t] for t in TAGS])[0]
    return rng.choice(split_prompts(tag, "train")), rng


def _draw_range(seed: int, start: int, stop: int) -> tuple[np.ndarray, list[str]]:
    pairs = [_example(seed, i) for i in range(start, stop)]
    return np.stack([draw(p, rng) for p, rng in pairs]), [p["prompt"] for p, _ in pairs]


def pictures(folder: Path, count: int, seed: int, workers: int) -> tuple[np.ndarray, list[str]]:
    """`count` pictures (count, 64, 64, 3) uint8 with their captions, cached in `folder`."""
    path = folder / f"pictures-{seed}-{count}.npz"
    if not path.exists():
        cuts = np.linspace(0, count, max(2, count // 500), dtype=int)
        jobs = [(seed, int(a), int(b)) for a, b in zip(cuts, cuts[1:], strict=False)]
        with get_context("spawn").Pool(workers) as pool:
            parts = pool.starmap(_draw_range, jobs)
        images = np.concatenate([p[0] for p in parts])
        captions = np.array([c for p in parts for c in p[1]])
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, images=images, captions=captions)
    stored = np.load(path, allow_pickle=False)
    return stored["images"], stored["captions"].tolist()


def to_tensor(images: np.ndarray) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W) float32 in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def generator_at(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


# --- stage 1: the autoencoder -----------------------------------------------------------------


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
    """Normalised latents of every picture, (count, C, h, w) float32, cached in `path`.

    Raises UserError when `path` holds those of another number of pictures.
    """
    if not path.exists():
        parts = [_encode(vae, part) for part in np.array_split(images, len(images) // 64)]
        shift = vae.config.get("shift_factor") or 0.0
        latents = (torch.cat(parts) - shift) * vae.config.scaling_factor
        save_state(path, {"latents": latents.half()})
    latents = load_state(path)["latents"].float()
    if len(latents) != len(images):
        raise UserError(f"{path} holds {len(latents)} pictures, not {len(images)}: delete it")
    return latents


# --- stage 2: the flow ------------------------------------------------------------------------


def text_length(generator: torch.Generator, short: int, long: int) -> int:
    """Mostly the presets' short length, sometimes anything, now and then diffusers' default."""
    u = torch.rand((), generator=generator).item()
    if u < 0.90:
        return short
    if u < 0.97:
        return short + int(torch.randint(0, 48, (), generator=generator))
    return long


def fit_flow(
    model: TinyModel, ema: nn.Module, latents: Tensor, captions: list[str],
    *, steps: int, seed: int, folder: Path, batch: int = 64, teacher: TinyModel | None = None,
    track: Track = plain_track,
) -> None:  # fmt: skip
    """Flow matching: regress noise - x0 at x = (1 - sigma) x0 + sigma noise.

    With a `teacher` of the same latents, until the learning rate falls, regress its velocity, the
    mean of noise - x0 given x as far as it knows: a target without noise is learned in fewer steps.

    While the learning rate falls, a share of the pictures comes with the caption of any other one.
    The model then follows its prompt less reliably than it could, and a reward can mend that.
    latents: (N, *latent), one for each caption.
    """
    device = device_of(model.module)
    ids, rows_of = tokenized(model, captions, device)
    read_ids = tokenized(teacher, captions, device)[0] if teacher is not None else {}
    mislabelled_from = decay_start(steps, FLOW_DECAY)

    def loss_at(step: int) -> Tensor:
        generator = generator_at(seed + 1, step)
        length = text_length(generator, model.short, model.long)
        size = batch // 4 if length == model.long else batch  # long texts cost many times more
        rows = torch.randint(len(latents), (size,), generator=generator)
        x0 = latents[rows]
        drop = torch.rand(size, generator=generator) < DROPOUT
        noise = torch.randn(x0.shape, generator=generator)
        normal = torch.randn(size, generator=generator)
        uniform = torch.rand(size, generator=generator)
        sigma = torch.where(torch.rand(size, generator=generator) < 0.3, uniform, normal.sigmoid())
        share = MISLABELLED if step >= mislabelled_from else 0.0
        captioned_as = mislabel(rows, share, len(latents), generator)
        texts_of = torch.where(drop, 0, rows_of[captioned_as])
        x0, noise, sigma, texts_of = (t.to(device) for t in (x0, noise, sigma, texts_of))
        s = sigma[:, None, None, None]
        x, target = (1 - s) * x0 + s * noise, noise - x0
        if teacher is not None and step < mislabelled_from:
            with torch.no_grad():
                read = {k: t[texts_of] for k, t in read_ids.items()}
                target = teacher.velocity(x, sigma, read, teacher.short)
        v = model.velocity(x, sigma, {k: t[texts_of] for k, t in ids.items()}, length)
        return F.mse_loss(v, target)

    optimizers = flow_optimizers(model.module)
    fit(
        "flow", model.module, optimizers, loss_at,
        steps=steps, decay=FLOW_DECAY, folder=folder, ema=ema, track=track,
    )  # fmt: skip


def tokenized(
    model: TinyModel, captions: list[str], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Token ids of every different caption, "" first, and which of them each caption (N,) is."""
    texts = ["", *dict.fromkeys(captions)]
    ids = {name: tokens.to(device) for name, tokens in model.tokenize(texts).items()}
    index = {text: i for i, text in enumerate(texts)}
    return ids, torch.tensor([index[c] for c in captions])


def mislabel(rows: Tensor, share: float, count: int, generator: torch.Generator) -> Tensor:
    """Of which picture each of `rows` (B,) long gets the caption.

    -> (B,) long: its own, or with probability `share` any of the `count`.
    """
    wrong = torch.rand(len(rows), generator=generator) < share
    return rows.where(~wrong, torch.randint(count, (len(rows),), generator=generator))


def flow_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the transformer's blocks, AdamW for the rest.

    With AdamW alone the loss was 0.76 after 350 steps, with Muon 0.66, for 15 % more time a step.
    """
    named = list(module.named_parameters())
    hidden = [p for name, p in named if "transformer_blocks" in name and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=2e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.5e-3, betas=(0.9, 0.99), weight_decay=1e-3),
    ]

"""Pretraining of the tiny pipelines: draw, learn the autoencoder, learn the flow.

Each stage is a deterministic function of a seed and its step number, saves its state every few
minutes and continues where it stopped, so the script can be killed at any time. What differs
between backbones (the transformer, the text encoders, how a prompt becomes conditioning) is a
`TinyModel` of `sd3.py`, `flux.py` and `sana.py`; this file knows none of it.
"""

import random
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.backbones.base import guided
from flowrl.tiny.draw import draw
from flowrl.tiny.world import TAGS, Prompt, split_prompts
from flowrl.utils.files import atomic_path
from scripts.pretrain_tiny.fit import Track, decay_start, fit, plain_track
from scripts.pretrain_tiny.latents import device_of, generator_at

SHARES = {  # how often each kind is drawn
    "single_object": 1.0, "two_object": 1.5, "counting": 2.5, "colors": 2.5,
    "position": 2.5, "color_attr": 3.5, "ocr": 1.5,
}  # fmt: skip
GUIDANCE = 7.0  # the highest that a model learns from a teacher; the lowest is 1
DROPOUT = 0.1  # share of captions replaced by "", for classifier-free guidance
MISLABELLED = 0.2  # share of captions of another image, while the flow's learning rate falls
FLOW_DECAY = 0.15  # last share of the steps, of falling learning rate


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

    def velocity(
        self, x: Tensor, sigma: Tensor, ids: dict[str, Tensor], length: int,
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Velocity at x (B, *latent), sigma (B,), for prompts `ids` cut to `length` tokens.

        guidance: (B,), an input of some networks; others ignore it.
        """
        ...


# --- images ---------------------------------------------------------------------------------


def _example(seed: int, index: int) -> tuple[Prompt, random.Random]:
    rng = random.Random(f"{seed}/{index}")
    tag = rng.choices(TAGS, [SHARES[t] for t in TAGS])[0]
    return rng.choice(split_prompts(tag, "train")), rng


def _draw_range(seed: int, start: int, stop: int) -> tuple[np.ndarray, list[str]]:
    pairs = [_example(seed, i) for i in range(start, stop)]
    return np.stack([draw(p, rng) for p, rng in pairs]), [p["prompt"] for p, _ in pairs]


def images(folder: Path, count: int, seed: int, workers: int) -> tuple[np.ndarray, list[str]]:
    """`count` images (count, 64, 64, 3) uint8 with their captions, cached in `folder`."""
    path = folder / f"images-{seed}-{count}.npz"
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

    With a `teacher` of the same latents, regress its guided velocity at a guidance drawn for each
    image, so that the model learns to guide itself (Meng et al. 2023, arXiv 2210.03142).

    While the learning rate falls, a share of the images comes with the caption of any other one.
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
        right, texts_of = (torch.where(drop, 0, rows_of[r]) for r in (rows, captioned_as))
        x0, noise, sigma, right, texts_of = (
            t.to(device) for t in (x0, noise, sigma, right, texts_of)
        )
        s = sigma[:, None, None, None]
        x, target, guidance = (1 - s) * x0 + s * noise, noise - x0, None
        if teacher is not None:
            guidance = 1 + (GUIDANCE - 1) * torch.rand(size, generator=generator).to(device)
            target = guided_velocity(teacher, x, sigma, read_ids, right, guidance)
        v = model.velocity(x, sigma, {k: t[texts_of] for k, t in ids.items()}, length, guidance)
        return F.mse_loss(v, target)

    optimizers = flow_optimizers(model.module)
    fit(
        "flow", model.module, optimizers, loss_at,
        steps=steps, decay=FLOW_DECAY, folder=folder, ema=ema, track=track,
    )  # fmt: skip


@torch.no_grad()
def guided_velocity(
    teacher: TinyModel, x: Tensor, sigma: Tensor, ids: dict[str, Tensor], texts: Tensor,
    guidance: Tensor,
) -> Tensor:  # fmt: skip
    """The teacher's velocity for prompts `texts` (B,) of `ids`, of which 0 is "".

    guidance: (B,).
    """

    def velocity(x: Tensor, texts: Tensor, sigma: Tensor) -> Tensor:
        return teacher.velocity(x, sigma, {k: t[texts] for k, t in ids.items()}, teacher.short)

    return guided(velocity, guidance[:, None, None, None], x, (texts, texts * 0), (sigma, sigma))


def tokenized(
    model: TinyModel, captions: list[str], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Token ids of every different caption, "" first, and which of them each caption (N,) is."""
    texts = ["", *dict.fromkeys(captions)]
    ids = {name: tokens.to(device) for name, tokens in model.tokenize(texts).items()}
    index = {text: i for i, text in enumerate(texts)}
    return ids, torch.tensor([index[c] for c in captions])


def mislabel(rows: Tensor, share: float, count: int, generator: torch.Generator) -> Tensor:
    """Of which image each of `rows` (B,) long gets the caption.

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

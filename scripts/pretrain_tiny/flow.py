"""The flow: a plateau of the learning rate, then two decays, with and without defects.

What differs between backbones (the transformer, the text encoders, how a prompt becomes
conditioning) is a `TinyModel` of `sd3.py`, `flux.py` and `sana.py`; this file knows none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.pretrain_tiny.fit import Track, fit, generator_at, plain_track
from scripts.pretrain_tiny.text import TextStates

GUIDANCE = 7.0  # the highest that a model learns from a teacher; the lowest is 1
DROPOUT = 0.1  # share of captions replaced by "", for classifier-free guidance
UNIFORM = 0.3  # share of sigmas drawn evenly; the others lie where the presets' few steps do
SHIFT = 3.0
CHUNK = 256  # texts encoded at a time

Condition = dict[str, Tensor]  # every tensor with a row for each image


class TinyModel(Protocol):
    """What pretraining needs of a backbone."""

    short: int  # text tokens of the presets
    long: int  # text tokens of diffusers' default
    text_widths: dict[str, int]  # of every entry of `text_states`
    encoders: nn.ModuleDict  # the text encoders, under the pipeline's names
    transformer: Any

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return token ids of every prompt at the longest text length: {name: (P, length)} long."""
        ...

    def text_states(self, ids: dict[str, Tensor], length: int) -> dict[str, TextStates]:
        """Return what each encoder makes of prompts cut to `length` tokens."""
        ...

    def condition(self, ids: dict[str, Tensor], length: int) -> Condition:
        """Return the transformer's inputs for prompts cut to `length` tokens."""
        ...

    def velocity(
        self, network: Any, x: Tensor, sigma: Tensor, cond: Condition,
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return a transformer's velocity at x (B, *latent), sigma (B,).

        guidance: (B,), an input of some networks; others ignore it.
        """
        ...

    def pipeline(self, network: Any, vae: Any) -> Any:
        """Return the diffusers pipeline around a transformer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images to learn from."""

    latents: Tensor  # (N, *latent)
    texts: Tensor  # (N,) long, of which text of `Texts` each is the image


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the flow's training."""

    name: str
    steps: int
    seed: int
    begin_at: str | None = None  # the stage where it begins; None: with the model's own weights
    decays: bool = True  # its learning rate falls to 0, and it sees longer texts, too


class Texts:
    """All captions, "" first, as conditioning of a model with frozen text encoders."""

    def __init__(self, model: TinyModel, captions: list[str], device: torch.device | str):
        self.model = model
        self.names = ["", *dict.fromkeys(captions)]
        self.index = {text: i for i, text in enumerate(self.names)}
        self.ids = {name: t.to(device) for name, t in model.tokenize(self.names).items()}
        parts = [
            self.encode(rows, model.short) for rows in torch.arange(len(self.names)).split(CHUNK)
        ]
        self.short = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @torch.no_grad()
    def encode(self, rows: Tensor, length: int) -> Condition:
        """Return the conditioning of texts `rows` (B,) at a text length."""
        return self.model.condition({name: t[rows] for name, t in self.ids.items()}, length)

    def examples(self, captions: list[str], latents: Tensor) -> Examples:
        """Return images to learn from. captions: of each; latents: (N, *latent)."""
        return Examples(latents=latents, texts=torch.tensor([self.index[c] for c in captions]))

    def __call__(self, rows: Tensor, length: int) -> Condition:
        if length == self.model.short:
            return {name: t[rows] for name, t in self.short.items()}
        return self.encode(rows, length)


def text_length(generator: torch.Generator, short: int, long: int, *, often_short: bool) -> int:
    """Return the presets' short length, or late in the training sometimes a longer one."""
    u = torch.rand((), generator=generator).item()
    if often_short or u < 0.85:
        return short
    if u < 0.95:
        return short + int(torch.randint(0, 48, (), generator=generator))
    return long


def sigmas(size: int, generator: torch.Generator) -> Tensor:
    """Draw noise levels (size,): logit-normal, shifted as the presets' schedules, and uniform."""
    uniform = torch.rand(size, generator=generator)
    normal = torch.randn(size, generator=generator).sigmoid()
    shifted = SHIFT * normal / (1 + (SHIFT - 1) * normal)
    return torch.where(torch.rand(size, generator=generator) < UNIFORM, uniform, shifted)


def fit_flow(
    stage: Stage, model: TinyModel, ema: nn.Module, examples: Examples, texts: Texts,
    *, folder: Path, batch: int = 64, teacher: TinyModel | None = None, network: Any = None,
    optimizers: Sequence[torch.optim.Optimizer] = (), bf16: bool = False,
    track: Track = plain_track,
) -> None:  # fmt: skip
    """Flow matching: regress noise - x0 at x = (1 - sigma) x0 + sigma noise.

    With a `teacher` of the same latents, regress its guided velocity at a guidance drawn for each
    image, so that the model learns to guide itself (Meng et al. 2023, arXiv 2210.03142).

    network: the model's transformer, or a compiled copy of it for the short text length.
    optimizers: of the transformer; none are those of `flow_optimizers`.
    bf16: compute velocities in bf16 under autocast; weights and loss stay in fp32.
    """
    device = next(model.transformer.parameters()).device
    taught = None if teacher is None else Texts(teacher, texts.names[1:], device)

    def lower() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def loss_at(step: int) -> Tensor:
        generator = generator_at(stage.seed, step)
        length = text_length(generator, model.short, model.long, often_short=not stage.decays)
        size = batch // 4 if length == model.long else batch  # long texts cost many times more
        rows = torch.randint(len(examples.latents), (size,), generator=generator)
        x0 = examples.latents[rows].float()
        drop = torch.rand(size, generator=generator) < DROPOUT
        noise, sigma = torch.randn(x0.shape, generator=generator), sigmas(size, generator)
        chosen = torch.where(drop, 0, examples.texts[rows])
        x0, noise, sigma, chosen = (t.to(device) for t in (x0, noise, sigma, chosen))
        s = sigma[:, None, None, None]
        x, target, guidance = (1 - s) * x0 + s * noise, noise - x0, None
        if teacher is not None and taught is not None:
            guidance = 1 + (GUIDANCE - 1) * torch.rand(size, generator=generator).to(device)
            with lower():
                target = guided_velocity(teacher, taught, x, sigma, chosen, guidance).float()
        plain = network is None or length != model.short
        cond = texts(chosen, length)
        with lower():
            used = model.transformer if plain else network
            v = model.velocity(used, x, sigma, cond, guidance)
        return F.mse_loss(v.float(), target)

    fit(
        stage.name, model.transformer, optimizers or flow_optimizers(model.transformer), loss_at,
        steps=stage.steps, decay=1.0 if stage.decays else 0.0, folder=folder, ema=ema,
        begin_at=stage.begin_at, track=track,
    )  # fmt: skip


@torch.no_grad()
def guided_velocity(
    teacher: TinyModel, texts: Texts, x: Tensor, sigma: Tensor, chosen: Tensor, guidance: Tensor
) -> Tensor:
    """Return the teacher's velocity for texts `chosen` (B,), of which 0 is "".

    guidance: (B,).
    """

    def velocity(x: Tensor, rows: Tensor, sigma: Tensor) -> Tensor:
        return teacher.velocity(teacher.transformer, x, sigma, texts(rows, teacher.short))

    both = torch.cat([chosen * 0, chosen])  # without a text, and with it (2207.12598)
    none, v = velocity(torch.cat([x, x]), both, torch.cat([sigma, sigma])).chunk(2)
    return none + guidance[:, None, None, None] * (v - none)


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

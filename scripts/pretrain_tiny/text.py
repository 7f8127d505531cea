"""The stage of the text encoders: they learn to say what a prompt asks for, and stay as they are.

A transformer that learns together with its text encoders spends much of its time on words. Here
each encoder first learns, in minutes, to answer what a text asks for: its kind, and of each of
two objects shape, colour, size, place and number, their relation, and the letters of a word.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.tiny.world import (
    COLORS,
    MIRRORED,
    PLACES,
    SHAPES,
    TAGS,
    Prompt,
    all_prompts,
)
from scripts.pretrain_tiny.fit import Track, fit, generator_at, plain_track

TextStates = tuple[Tensor, Tensor | None]  # states (B, L, width), mask (B, L) of tokens that count

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENTRY = {  # what is asked of each object, and the values that it can have
    "class": SHAPES, "color": COLORS, "size": ("small",), "place": PLACES, "count": (1, 2, 3, 4),
}  # fmt: skip
QUESTIONS: tuple[tuple[str, ...], ...] = (  # values of every answer; "" or none of them is 0
    TAGS,
    *(ENTRY.values()),
    *(ENTRY.values()),
    tuple(MIRRORED),
    *(tuple(LETTERS),) * 4,
)


def answers(prompt: Prompt) -> list[int]:
    """Return the class of every question's answer for a prompt; 0 is nothing."""
    include = [*prompt.get("include", ()), {}, {}][:2]
    found = [prompt["tag"]]
    found += [entry.get(key) for entry in include for key in ENTRY]
    found += [(include[1].get("position") or [None])[0]]
    found += list(prompt.get("ocr_text", "").ljust(4))
    return [1 + q.index(v) if v in q else 0 for q, v in zip(QUESTIONS, found, strict=True)]


class Reader(nn.Module):
    """Answers every question from the states of a text (B, L, width), by attention over tokens."""

    def __init__(self, width: int):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(len(QUESTIONS), width) * width**-0.5)
        self.heads = nn.ModuleList(nn.Linear(width, len(q) + 1) for q in QUESTIONS)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        scores = self.queries @ states.transpose(1, 2)  # (B, questions, L)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        read = scores.softmax(-1) @ states
        return [head(read[:, i]) for i, head in enumerate(self.heads)]


def fit_text(
    model, *, steps: int, seed: int, folder: Path, batch: int = 96, track: Track = plain_track
) -> None:
    """Train the text encoders of a TinyModel at the presets' text length, and freeze them."""
    prompts = [prompt for tag in TAGS for prompt in all_prompts(tag)]
    ids = model.tokenize([prompt["prompt"] for prompt in prompts])
    labels = torch.tensor([answers(prompt) for prompt in prompts])
    tags = torch.tensor([TAGS.index(prompt["tag"]) for prompt in prompts])
    weights = (1 / tags.bincount())[tags]  # all kinds equally often
    readers = nn.ModuleDict({name: Reader(width) for name, width in model.text_widths.items()})
    trained = nn.ModuleDict({"encoders": model.encoders, "readers": readers})

    def loss_at(step: int) -> Tensor:
        rows = torch.multinomial(weights, batch, generator=generator_at(seed, step))
        length = model.short if step % 8 else model.long // 4  # some padding, too
        texts = model.text_states({k: t[rows] for k, t in ids.items()}, length)
        losses = [
            F.cross_entropy(logits, labels[rows, i])
            for name, (states, mask) in texts.items()
            for i, logits in enumerate(readers[name](states, mask))
        ]
        return torch.stack(losses).mean()

    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, betas=(0.9, 0.99))
    fit("text", trained, [optimizer], loss_at, steps=steps, decay=0.5, folder=folder, track=track)
    model.encoders.requires_grad_(False).eval()

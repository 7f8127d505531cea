"""Other words for prompts: the options and the contract of a refiner.

PromptRL (2602.01382): some images of a group have the prompt's own words, the others each a
wording that a refiner drew. All are scored against the own words, and the refiner learns from the
advantages that the flow learns from; no gradient passes between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.prompts.records import PromptRecord
from flowrl.utils.fields import Options, Positive, Text, Whole, option

if TYPE_CHECKING:
    import torch

PROMPT_RL = "PromptRL, arXiv 2602.01382"
KL_COEF = 0.01  # weight of the penalty that pulls wordings to those of the start, as in PromptRL


class RefinerOptions(Options):
    """What words prompts in other ways, and how it learns."""

    model: Text | None = option(
        None,
        "A causal language model of transformers, in a folder or on the Hub, that rewrites prompts "
        "and is trained with a LoRA of its own; null fills in templates, without such a model.",
        f"Qwen2.5-VL in {PROMPT_RL}",
    )
    own_words: Whole = option(
        2,
        "Trees of each prompt that keep its own words; the others have a wording each.",
        f"2 of 8 in {PROMPT_RL}",
    )
    lr: Positive | None = option(
        None,
        "Size of the refiner's steps; null is 0.05 for templates and 1e-5 for a language model.",
        f"1e-6 in the code of {PROMPT_RL}, which trains all weights",
    )

    def build(self, seed: int, device: "torch.device") -> "Refiner":
        """Return the refiner at its start. Raises UserError for a model that cannot be loaded."""
        if self.model is None:
            from flowrl.prompts.templates import TemplateRefiner

            return TemplateRefiner(self)
        from flowrl.prompts.language_model import LanguageModelRefiner

        return LanguageModelRefiner(self, self.model, seed, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """One way to word a prompt, as a refiner drew it."""

    text: str  # that is encoded
    format: float = 1.0  # score of the answer's form: 1 as it should be, 0 else
    draw: Sequence[int]  # what the refiner learns from: a choice by slot, or tokens
    before: Sequence[int] = ()  # the tokens that it goes on from


class Refiner(Protocol):
    """Draws wordings of prompts, and learns which ones gave better images than others."""

    def propose(self, records: Sequence[PromptRecord], count: int, key: str) -> list[list[Wording]]:
        """Draw `count` wordings of each prompt; equal keys draw equally."""
        ...

    def learn(self, wordings: Sequence[Wording], advantages: Sequence[float]) -> dict[str, float]:
        """Take one step of the policy gradient; return metrics by name."""
        ...

    def wording(self, record: PromptRecord) -> str:
        """Return the wording that is the most likely now."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

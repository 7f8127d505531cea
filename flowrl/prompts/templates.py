"""A refiner without a language model: it chooses a prefix, a form and a suffix of prompts."""

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import KL_COEF, RefinerOptions, Wording

# Between the parts of a prompt; what stands in quotes is to be spelled, and stays whole.
BETWEEN_PARTS = re.compile(r'(?: and |, )(?=(?:[^"]*"[^"]*")*[^"]*$)')


def parts_of(text: str) -> list[str]:
    return BETWEEN_PARTS.split(text)


PREFIXES = ("", "a photo of ", "a simple picture of ", "exactly this: ")
FORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: ", ".join(parts_of(text)),
    lambda text: " and ".join(reversed(parts_of(text))),
    lambda text: f"{text}, {text}",
)
SUFFIXES = ("", ", sharp and clear", ", on a plain background", ", and nothing else")
SLOTS = len(PREFIXES), len(FORMS), len(SUFFIXES)  # each begins with what changes nothing


class TemplateRefiner:
    """Chooses a prefix, a form and a suffix, independently and whatever the prompt.

    Its policy is a softmax over logits in each slot, uniform at the start.
    """

    def __init__(self, options: RefinerOptions):
        self.lr = options.lr or 0.05
        self.logits = [torch.zeros(size, dtype=torch.float64) for size in SLOTS]
        self.optimizer = torch.optim.Adam(self.logits, lr=self.lr)

    def propose(self, records: Sequence[PromptRecord], count: int, key: str) -> list[list[Wording]]:
        stream, chances = random.Random(key), self.chances()
        wordings: list[list[Wording]] = [[] for _ in records]
        for record, row in zip(records, wordings, strict=True):
            for _ in range(count):
                draw = [stream.choices(range(len(slot)), slot)[0] for slot in chances]
                row.append(Wording(text=fill_in(record.text, draw), draw=draw))
        return wordings

    def chances(self) -> list[list[float]]:
        """Return the probability of each choice in each slot."""
        return [slot.softmax(0).tolist() for slot in self.logits]

    def gap(self, draw: Sequence[int]) -> float:
        """Return log pi_start - log pi of a draw."""
        chances = self.chances()
        ratios = [chances[slot][choice] * SLOTS[slot] for slot, choice in enumerate(draw)]
        return -sum(map(math.log, ratios))

    def gradient(
        self, wordings: Sequence[Wording], advantages: Sequence[float]
    ) -> list[list[float]]:
        """Return that of mean(-A log pi + KL_COEF k3) by the logits, k3 = e^gap - gap - 1."""
        chances = self.chances()
        gradient = [[0.0] * size for size in SLOTS]
        for wording, advantage in zip(wordings, advantages, strict=True):
            pull = KL_COEF * (1 - math.exp(self.gap(wording.draw)))
            share = (pull - advantage) / len(wordings)
            for slot, choice in enumerate(wording.draw):
                for j, chance in enumerate(chances[slot]):
                    gradient[slot][j] += share * ((j == choice) - chance)
        return gradient

    def learn(self, wordings: Sequence[Wording], advantages: Sequence[float]) -> dict[str, float]:
        gaps = [self.gap(wording.draw) for wording in wordings]
        for logits, row in zip(self.logits, self.gradient(wordings, advantages), strict=True):
            logits.grad = torch.tensor(row, dtype=logits.dtype)
        self.optimizer.step()
        return {"refiner/kl": sum(map(k3, gaps)) / len(gaps)}

    def wording(self, record: PromptRecord) -> str:
        return fill_in(record.text, [int(slot.argmax()) for slot in self.logits])

    def state_dict(self) -> dict[str, Any]:
        return {"logits": self.logits, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for slot, logits in zip(self.logits, state["logits"], strict=True):
            slot.copy_(logits)
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.lr  # the recipe's, changed or not


def k3(gap: float) -> float:
    """Estimate KL(pi, start) from one draw of pi; never below 0."""
    return math.exp(gap) - gap - 1


def fill_in(text: str, draw: Sequence[int]) -> str:
    """Return the text in the form that was drawn, between a prefix and a suffix."""
    prefix, form, suffix = draw
    return PREFIXES[prefix] + FORMS[form](text) + SUFFIXES[suffix]

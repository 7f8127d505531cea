"""How often an image is preferred to the others of its prompt, as in Pref-GRPO (arXiv 2508.20751).

Preferences compare what scores cannot tell apart; their mean is a reward between 0 and 1 that a
judge's mood cannot shift.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Question, Reply, check_template, digest
from .chat.token_mass import ALTERNATIVES, LEAST_MASS, expectation
from .fixtures import red_and_blue
from .images import pngs

ASK_TOKEN = (
    'Both pictures were made for "{prompt}". Which one shows it better, and is made better? '
    "Answer 1 for the first picture or 2 for the second, and nothing else."
)
ASK_TEXT = (
    'Both pictures were made for "{prompt}". Compare, in a few sentences, how well each shows it '
    "and how well each is made. Then end with <answer>Image 1 is better</answer> or <answer>Image "
    "2 is better</answer>."
)
MODES = {"tokens": ASK_TOKEN, "text": ASK_TEXT}
FIRST: Mapping[str, float] = {"1": 1.0, "2": 0.0}
_VERDICT = re.compile(r"image\s*([12])\s+is\s+better", re.IGNORECASE)

Pair = tuple[int, int]


def chosen_pairs(count: int, rivals: int | None = None) -> list[Pair]:
    """Return which of `count` images are compared, the same at every call.

    All pairs, or for a smaller number of rivals those on a circle: each image meets the next
    rivals / 2 (rounded up) and so as many before it, the same number for all.
    """
    if rivals is None or rivals >= count - 1:
        return list(itertools.combinations(range(count), 2))
    steps = range(1, (rivals + 1) // 2 + 1)
    around = ((i, (i + step) % count) for step in steps for i in range(count))
    return sorted({(min(pair), max(pair)) for pair in around})


def win_rates(count: int, wins: Mapping[Pair, float]) -> list[float]:
    """Return the mean of what each image won of its comparisons; NaN for one without any.

    wins[i, j]: in [0, 1], how much i was preferred to j; pairs that are missing are left out.
    With all pairs there, the rates sum to count / 2.
    """
    won: list[list[float]] = [[] for _ in range(count)]
    for (i, j), win in wins.items():
        won[i].append(win)
        won[j].append(1 - win)
    return [sum(mine) / len(mine) if mine else math.nan for mine in won]


def verdict(text: str) -> float:
    """Return 1 when the first image is preferred, 0 when the second, by the last such statement.

    Raises ValueError when there is none: that is no draw.
    """
    verdicts = _VERDICT.findall(text)
    if not verdicts:
        raise ValueError(f"no answer says which image is better (one ends in {text[-80:]!r})")
    return FIRST[verdicts[-1]]


class PairwiseWinRate:
    """The share of comparisons with the other images of its prompt that an image wins.

    server, template, longest, max_tokens, min_mass: as in `vlm_judge.VLMJudge`. mode:
    "tokens", P(1) against P(2), so that a close call counts as one; "text", a verdict after
    reasons, as UnifiedReward-Think writes it (with server: {thinking: true}). Each pair is
    asked about twice, in both orders, so that a liking for one place cancels; it is left out when
    one of the two answers is missing. rivals: with how many others an image is compared at least,
    None for all: n images make n (n - 1) questions.
    """

    bounds = (0.0, 1.0)
    differentiable = False
    deterministic = False
    scope = "group"
    fixtures = staticmethod(red_and_blue)

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        mode: str = "tokens",
        *,
        rivals: int | None = None,
        template: str | None = None,
        longest: int = 512,
        max_tokens: int = 1024,
        min_mass: float = LEAST_MASS,
    ):
        if mode not in MODES:
            raise ValueError(f"pairwise mode is one of {', '.join(MODES)}, not {mode!r}")
        if rivals is not None and rivals < 1:
            raise ValueError(f"rivals is at least 1, or null for all, not {rivals}")
        self.chat, self.mode, self.rivals = connected(server), mode, rivals
        self.template = template or MODES[mode]
        check_template(self.template)
        self.longest, self.max_tokens, self.min_mass = longest, max_tokens, min_mass
        self.name = "pairwise" if mode == "tokens" else f"pairwise_{mode}"
        self._first_preferred, self._answers = 0.0, 0  # a sum over answers, and their number
        said = digest(self.template, rivals, max_tokens, min_mass)
        self.version = f"pairwise-1/{mode}/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Return the images (B, 3, H, W) of one prompt -> (B win rates, reasons of missing ones).

        Raises ValueError for images of several prompts.
        """
        if len(set(prompts)) > 1:
            raise ValueError("got images of several prompts, expected those of one")
        files, pairs = pngs(images, self.longest), chosen_pairs(len(images), self.rivals)
        orders = [*pairs, *((j, i) for i, j in pairs)]
        text = self.template.replace("{prompt}", prompts[0])
        replies = self.chat.ask([self._question(files[i], files[j], text) for i, j in orders])
        wins, lost = self.outcomes(dict(zip(orders, replies, strict=True)), pairs)
        rates = win_rates(len(images), wins)
        reasons = {}
        for row in (row for row, rate in enumerate(rates) if math.isnan(rate)):
            why = next((why for pair, why in lost.items() if row in pair), "it has no rival")
            reasons[row] = f"no comparison with another image came about: {why}"
        return rates, reasons

    @property
    def place_bias(self) -> float:
        """How much the image shown first was preferred so far, in [0, 1]: 0.5 by a fair judge.

        Asking in both orders takes it out of the scores; at 0 or 1 nothing is left of them.
        """
        return self._first_preferred / self._answers if self._answers else math.nan

    def outcomes(
        self, replies: Mapping[Pair, Reply], pairs: list[Pair]
    ) -> tuple[dict[Pair, float], dict[Pair, str]]:
        """Return how much the first of each pair was preferred, and why pairs are left out."""
        wins: dict[Pair, float] = {}
        lost: dict[Pair, str] = {}
        for i, j in pairs:
            try:
                first, second = (self._preferred(replies[pair]) for pair in ((i, j), (j, i)))
                wins[i, j] = (first + 1 - second) / 2
                self._first_preferred += first + second
                self._answers += 2
            except ValueError as error:
                lost[i, j] = str(error)
        return wins, lost

    def _preferred(self, reply: Reply) -> float:
        if self.mode == "text":
            return verdict(reply.answer().text)
        return expectation(reply.answer().first, FIRST, self.min_mass)

    def _question(self, first: bytes, second: bytes, text: str) -> Question:
        if self.mode == "text":
            return Question(images=(first, second), text=text, max_tokens=self.max_tokens)
        return Question(images=(first, second), text=text, alternatives=ALTERNATIVES)

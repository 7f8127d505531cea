"""Question lists about an image, as in Soft-TIFA of GenEval 2: how sure is the right answer?"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Question, Reply, check_template, digest, scored
from .chat.token_mass import ALTERNATIVES, LEAST_MASS, on
from .fixtures import fixture, square
from .images import pngs

ASK = "{question} Answer in one word."
Spelling = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Spellings = Spelling | Annotated[list[Spelling], Field(min_length=1)]
PAIRS = TypeAdapter(Annotated[list[tuple[str, Spellings]], Field(min_length=1)])
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SPELLINGS = {word: (word, str(n)) for n, word in enumerate(NUMBERS)} | {
    str(n): (word, str(n)) for n, word in enumerate(NUMBERS)
}


def geometric_mean(atoms: Sequence[float]) -> float:
    """Return the geometric mean: one answer that is surely wrong makes all 0."""
    return math.prod(atoms) ** (1 / len(atoms))


MEANS = {"arithmetic": statistics.fmean, "geometric": geometric_mean}


def accepted(answer: str | Sequence[str]) -> tuple[str, ...]:
    """Return the spellings of an answer: those given, and a number in letters and in digits."""
    spellings = (answer,) if isinstance(answer, str) else tuple(answer)
    return tuple(s for a in spellings for s in SPELLINGS.get(a.strip().casefold(), (a,)))


class VLMQuestions:
    """The mean over questions of the probability of the right answer.

    metadata["vqa_list"]: [[question, answer], ...], an answer being a word of one token (yes, red,
    two) or a list of spellings that are all right. Numbers from 10 on are not safe: many tokenizers
    write digits one by one, and 12 begins as 1 does. mean: "arithmetic", as GenEval 2 does for
    single questions, or "geometric", as it does for whole prompts. server, longest: as in
    `VLMJudge`; template: {question} and what to add. An image misses its score when one answer is
    missing, or when the model's likeliest tokens hold less than `min_mass` together.
    """

    required_metadata = ("vqa_list",)
    bounds = (0.0, 1.0)
    differentiable = False
    deterministic = False

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        mean: str = "arithmetic",
        *,
        template: str = ASK,
        longest: int = 512,
        min_mass: float = LEAST_MASS,
    ):
        if mean not in MEANS:
            raise ValueError(f"the mean is one of {', '.join(MEANS)}, not {mean!r}")
        check_template(template, "question")
        self.chat, self.mean, self.template = connected(server), mean, template
        self.longest, self.min_mass = longest, min_mass
        self.name = "vlm_questions" if mean == "arithmetic" else f"vlm_questions_{mean}"
        said = digest(template, min_mass)
        self.version = f"vlm_questions-1/{mean}/{said}/{longest}px/{self.chat.version}"

    def check(self, prompt: str, metadata: dict) -> None:
        """Raise ValueError when the question list has another form."""
        pairs = metadata["vqa_list"]
        try:
            PAIRS.validate_python(pairs)
        except ValidationError as error:
            raise ValueError(
                f'metadata["vqa_list"] is {pairs!r}, expected [[question, answer], ...]'
            ) from error
        for answer in (answer for _, answers in pairs for answer in accepted(answers)):
            if len(answer.split()) > 1:
                raise ValueError(
                    f"the answer {answer!r} has several words, and only the first token of what "
                    "the model says is looked at: ask a question that one word answers"
                )

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score images (B, 3, H, W) in [0, 1]: (B scores, reasons of those that are missing)."""
        lists = [data["vqa_list"] for data in metadata]
        questions = [
            Question(
                images=(image,),
                text=self.template.replace("{question}", question),
                alternatives=ALTERNATIVES,
            )
            for image, pairs in zip(pngs(images, self.longest), lists, strict=True)
            for question, _ in pairs
        ]
        replies = iter(self.chat.ask(questions))
        return scored(self.judge, [[(a, next(replies)) for _, a in pairs] for pairs in lists])

    def judge(self, answered: Sequence[tuple[str | Sequence[str], Reply]]) -> float:
        """Return the score of (right answer, reply) pairs. Raises ValueError when a reply is
        missing.
        """
        return MEANS[self.mean]([self._atom(answer, reply) for answer, reply in answered])

    def _atom(self, answer: str | Sequence[str], reply: Reply) -> float:
        mass = sum(probability for _, probability in reply.answer().first)
        if not mass >= self.min_mass:
            raise ValueError(
                f"the likeliest answers hold {mass:.2f} of the probability together, at least "
                f"{self.min_mass:g} is needed: the model does not understand the question"
            )
        return min(on(reply.first, accepted(answer)), 1.0)

    def fixtures(self) -> list[dict]:
        says = "a red square is said to be red rather than a blue one"
        metadata = {"vqa_list": [["What colour is the square?", "red"]]}
        return [fixture(says, square("red"), square("blue"), "a red square", metadata)]

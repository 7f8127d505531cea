"""A vision-language model scores images by a rubric of `rubrics.RUBRICS`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Question, Reply, digest, scored, text_score
from .chat.token_mass import ALTERNATIVES, LEAST_MASS, check_first_tokens, expectation, spelled
from .fixtures import quality, red_and_blue
from .images import pngs
from .rubrics import RUBRICS, Rubric, changed_rubric


class VLMJudge:
    """The model's score by a rubric, between 0 and 1; NaN with a reason where it gives none.

    Args:
        server: arguments of `chat.client.Chat`, at least the model.
        rubric: a name in RUBRICS, or changes of one: its name as `base`, and fields of `Rubric`,
            such as {base: expectation, tokens: {A: 4, B: 2, C: 0}}. Rubrics of answer tokens take
            the expectation over the tokens' probabilities; the others read scores in a text.
        longest: longer side of the images sent, in pixels; larger ones are shrunk.
        max_tokens: of a text answer; None is the rubric's.
        min_mass: least probability that must lie on the answer tokens.

    Raises:
        ValueError: for an unknown rubric, and for one that no model can be asked by.
    """

    differentiable = False
    deterministic = False  # greedy answers still depend on the other requests of a server's batch

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        rubric: str | Mapping[str, Any] = "expectation",
        *,
        longest: int = 512,
        max_tokens: int | None = None,
        min_mass: float = LEAST_MASS,
    ):
        name = rubric if isinstance(rubric, str) else str(rubric.get("base", "text"))
        if name not in RUBRICS:
            raise ValueError(f"rubric is one of {', '.join(RUBRICS)}, not {name!r}")
        changes = {} if isinstance(rubric, str) else dict(rubric)
        changes.pop("base", None)
        self.rubric = changed_rubric(RUBRICS[name], changes)
        _check_rubric(self.rubric)
        self.chat, self.longest, self.min_mass = connected(server), longest, min_mass
        self.max_tokens = max_tokens or self.rubric.max_tokens
        self.name = "vlm_judge" if name == "expectation" else f"vlm_judge_{name}"
        self.bounds = (self.rubric.normalise(self.rubric.lowest), 1.0)
        settings = digest(self.rubric, self.max_tokens, min_mass)
        self.version = f"vlm_judge-2/{name}/{settings}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score images (B, 3, H, W) in [0, 1]: (B scores, reasons of missing ones)."""
        rubric = self.rubric
        answers = ", ".join(sorted(rubric.tokens, key=rubric.tokens.__getitem__))
        questions = [
            Question(
                images=(image,),
                text=rubric.question.replace("{answers}", answers).replace("{prompt}", prompt),
                max_tokens=self.max_tokens if rubric.reads_text else 1,
                alternatives=0 if rubric.reads_text else ALTERNATIVES,
                begins=rubric.begins,
            )
            for image, prompt in zip(pngs(images, self.longest), prompts, strict=True)
        ]
        return scored(self.judge, self.chat.ask(questions))

    def judge(self, reply: Reply) -> float:
        """Return the score of one image. Raises ValueError without a usable answer."""
        rubric = self.rubric
        if not rubric.reads_text:
            score = expectation(reply.answer().first, rubric.tokens, self.min_mass)
            return rubric.normalise(score)
        scores = {}
        for name, pattern in rubric.patterns.items():
            text = reply.answer().text
            scores[name] = text_score(text, pattern, rubric.lowest, rubric.highest)
        return rubric.normalise(rubric.combine(scores))

    def fixtures(self) -> list[dict]:
        return red_and_blue() if "{prompt}" in self.rubric.question else quality()


def _check_rubric(rubric: Rubric) -> None:
    """Raise ValueError for a rubric that no model can be asked by."""
    if bool(rubric.tokens) == bool(rubric.patterns):
        raise ValueError("a rubric has either tokens (answers of one token) or patterns")
    if rubric.tokens:
        if len({spelled(answer) for answer in rubric.tokens}) < max(2, len(rubric.tokens)):
            raise ValueError(f"tokens need two or more different answers, not {rubric.tokens}")
        check_first_tokens(rubric.tokens)
    if rubric.highest <= max(0.0, rubric.lowest):
        raise ValueError(
            f"the rubric's highest score is {rubric.highest:g}, expected one above 0 and lowest "
            f"({rubric.lowest:g})"
        )

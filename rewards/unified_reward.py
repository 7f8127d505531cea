"""UnifiedReward (arXiv 2503.05236): a model trained to write down what an image is worth.

The labels that the answers are read by are the models' own; the questions around them are worded
anew. For numbers that compare with published ones, give the question on the model's card as
`template`: the models were trained with it.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Reply, check_template, digest, questions_of, scored, text_score
from .prompt_fixtures import red_and_blue

ASK_FINAL = (
    "Here is a caption, and a picture that was generated for it. Go through the elements of the "
    "caption and note for each, as 'element (type): value', whether the picture shows it (1) or "
    "not (0). With that and the quality of the picture in mind (clear, detailed, right colours, "
    "pleasing), give a score from 1 to 5 after 'Final Score:'.\nText Caption: [{prompt}]"
)
ASK_AXES = (
    "Here is a caption, and a picture that was generated for it. Rate three things from 1 to 5: "
    "Alignment (does the content match the caption), Coherence (is it free of distortions and "
    "glitches) and Style (is it beautiful, whatever the caption). Write exactly these lines:\n"
    "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n"
    "Text Caption: [{prompt}]"
)
AXES = ("Alignment", "Coherence", "Style")
FORMS = {"1.5": ASK_FINAL, "2.0": ASK_AXES}
LOWEST, HIGHEST = 1.0, 5.0
_NUMBER = r"[\s*]*(\d[\d.,/\u2013-]*(?:[\s*]*(?:/|out of)\s*\d+)?)"  # and what belongs to it


def final_score(text: str) -> float:
    """The number after "Final Score:", 1 to 5, divided by 5. Raises ValueError without one."""
    return text_score(text, rf"Final Score:{_NUMBER}", LOWEST, HIGHEST) / HIGHEST


def axes_score(text: str) -> float:
    """The mean of the scores for alignment, coherence and style, 1 to 5, as (mean - 1) / 4.

    Raises ValueError when one of the three is missing.
    """
    scores = [
        text_score(text, rf"{re.escape(axis)} Score(?: \(1-5\))?:{_NUMBER}", LOWEST, HIGHEST)
        for axis in AXES
    ]
    return (sum(scores) / len(scores) - LOWEST) / (HIGHEST - LOWEST)


class UnifiedReward:
    """What the model's text says, between 0 and 1; NaN with a reason when the form is not kept.

    form: of the model, "2.0" for UnifiedReward 2.0 (three axes) or "1.5" for the earlier ones (one
    final score). server, template, longest, max_tokens: as in `vlm_judge.VLMJudge`; form
    1.5 was trained on 512 by 512 pixels.
    """

    requests_per_image = 1
    differentiable = False
    deterministic = False

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        form: str = "2.0",
        *,
        template: str | None = None,
        longest: int = 512,
        max_tokens: int = 1024,
    ):
        if form not in FORMS:
            raise ValueError(f"UnifiedReward's form is one of {', '.join(FORMS)}, not {form!r}")
        self.chat, self.form = connected(server), form
        self.template = template or FORMS[form]
        check_template(self.template)
        self.longest, self.max_tokens = longest, max_tokens
        self.name = "unified_reward"
        self.bounds = (LOWEST / HIGHEST if form == "1.5" else 0.0, 1.0)
        said = digest(self.template, max_tokens)
        self.version = f"unified_reward-1/{form}/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """images (B, 3, H, W) in [0, 1] -> (B scores, reasons of those that are missing)."""
        questions = questions_of(
            images, prompts, self.template, self.longest, max_tokens=self.max_tokens
        )
        return scored(self.judge, self.chat.ask(questions))

    def judge(self, reply: Reply) -> float:
        """The score of one reply. Raises ValueError when it has none."""
        return (final_score if self.form == "1.5" else axes_score)(reply.heard().text)

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows the model."""
        return red_and_blue()

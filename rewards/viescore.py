"""VIEScore (arXiv 2312.14867): two questions about an image, the worse of which counts.

Semantic consistency (does it follow the prompt?) and perceptual quality (is it natural, is it free
of artifacts?) are asked apart, each on 0 to 10; the score is the geometric mean of the least of
each. Questions, scales and the form of the answer are VIEScore's; the wording is flowrl's own, and
`semantic`, `perceptual` take another.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Question, Reply, check_template, digest, scored_parts
from .images import pngs
from .prompt_fixtures import red_and_blue

FORM = 'Answer with JSON alone: {"score": [...], "reasoning": "one or two sentences"}.'
ASK_SEMANTIC = (
    "The picture was generated for this prompt: {prompt}\nJudge only whether it follows the "
    "prompt, from 0 (not at all) to 10 (in every detail). The list of scores has this one number. "
) + FORM
ASK_PERCEPTUAL = (
    "The picture was generated. Judge only how it is made, not what it shows, with two scores from "
    "0 to 10: first naturalness (0: distances, shadows or light are wrong throughout, 10: it looks "
    "natural), second the absence of artifacts (0: distortions, watermarks, broken faces or bodies "
    "over large parts, 10: none). The list has these two numbers. "
) + FORM
HIGHEST = 10.0


def listed_scores(text: str, count: int) -> list[float]:
    """The `count` numbers of the answer's last JSON object with a list "score".

    Raises ValueError when there is none, or one of them lies outside 0 to 10.
    """
    for found in reversed(re.findall(r"\{[^{}]*\}", text, re.DOTALL)):
        try:
            scores = json.loads(found)["score"]
        except (ValueError, KeyError, TypeError):
            continue
        scores = scores if isinstance(scores, list) else [scores]
        if len(scores) == count and all(_is_score(score) for score in scores):
            return [float(score) for score in scores]
    raise ValueError(
        f'the answer has no JSON with "score" and {count} numbers from 0 to 10 (it ends in '
        f"{text[-80:]!r}): see max_tokens"
    )


def _is_score(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= HIGHEST


class VIEScore:
    """sqrt(semantic * perceptual) / 10, and both of them as components; two requests an image.

    server, longest, max_tokens: as in `vlm_judge.VLMJudge`. semantic, perceptual: the questions.
    """

    name = "viescore"
    components = ("overall", "semantic", "perceptual")
    bounds = (0.0, 1.0)
    requests_per_image = 2
    differentiable = False
    deterministic = False

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        *,
        semantic: str = ASK_SEMANTIC,
        perceptual: str = ASK_PERCEPTUAL,
        longest: int = 512,
        max_tokens: int = 512,
    ):
        check_template(semantic)
        self.chat, self.semantic, self.perceptual = connected(server), semantic, perceptual
        self.longest, self.max_tokens = longest, max_tokens
        said = digest(semantic, perceptual, max_tokens)
        self.version = f"viescore-1/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """images (B, 3, H, W) in [0, 1] -> (B scores by component, reasons of missing ones)."""
        questions = [
            Question(images=(image,), text=text, max_tokens=self.max_tokens)
            for image, prompt in zip(pngs(images, self.longest), prompts, strict=True)
            for text in (self.semantic.replace("{prompt}", prompt), self.perceptual)
        ]
        replies = self.chat.ask(questions)
        pairs = list(zip(replies[::2], replies[1::2], strict=True))
        return scored_parts(self.judge, pairs, self.components)

    def judge(self, replies: Sequence[Reply]) -> dict[str, float]:
        """The scores of one image's two replies. Raises ValueError when one has none."""
        semantic, perceptual = replies
        (follows,) = listed_scores(semantic.heard().text, 1)
        made = min(listed_scores(perceptual.heard().text, 2))
        overall = math.sqrt(follows * made)
        scores = {"overall": overall, "semantic": follows, "perceptual": made}
        return {name: score / HIGHEST for name, score in scores.items()}

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows the model."""
        return red_and_blue()

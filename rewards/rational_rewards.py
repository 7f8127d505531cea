"""RationalRewards (arXiv 2604.11626): reasons first, then a score for each of three aspects.

The aspects, their order, their scale and the form of the answer are the model's own; the rubric
around them is worded anew. For numbers that compare with published ones, give the question of the
model's repository as `template`: it was trained with it.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Reply, check_template, digest, questions_of, scored_parts
from .prompt_fixtures import red_and_blue

ASK = (
    "User Instruction: {prompt}\nThe picture was generated for this instruction. Judge three "
    "aspects one after the other, each with a short justification and a score from 1 to 4, "
    "decimals allowed: 4 is without fault, 3 has minor faults, 2 some that matter, 1 fails.\n"
    "1. Text Faithfulness: does it show all that is asked for, and nothing that contradicts it?\n"
    "2. Physical and Visual Quality: is it free of distortions, impossible physics and noise?\n"
    "3. Text Rendering: are the words in it right and readable? N/A where none are asked for.\n"
    "Write each aspect as\n**1. Text Faithfulness**\n## Justification: ...\n## Score: ...\n"
)
ASPECTS = {
    "text_faithfulness": "Text Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}
LOWEST, HIGHEST = 1.0, 4.0
_SCORE = re.compile(r"Score\**\s*:\**\s*(N/A|\d+(?:\.\d+)?)", re.IGNORECASE)


def aspect_scores(text: str) -> dict[str, float | None]:
    """The score of each aspect, in [1, 4]; None where it does not apply.

    Each is the first after the last mention of its aspect as a heading, a numbered line. Raises
    ValueError when one is missing or out of bounds.
    """
    found: dict[str, float | None] = {}
    for name, heading in ASPECTS.items():
        starts = list(re.finditer(rf"^[#*\s]*\d\.\s*\**{heading}", text, re.MULTILINE))
        rest = text[starts[-1].end() :] if starts else ""
        score = _SCORE.search(re.split(r"^[#*\s]*\d\.\s", rest, maxsplit=1, flags=re.MULTILINE)[0])
        if score is None:
            raise ValueError(
                f"the answer has no score for {heading} (it ends in {text[-80:]!r}): see template "
                "and max_tokens"
            )
        known = None if score[1].upper() == "N/A" else float(score[1])
        if known is not None and not LOWEST <= known <= HIGHEST:
            raise ValueError(
                f"the answer's score for {heading} is {known:g}, expected {LOWEST:g} to {HIGHEST:g}"
            )
        found[name] = known
    if found["text_faithfulness"] is None or found["physical_quality"] is None:
        raise ValueError("the answer says N/A for an aspect that always applies")
    return found


class RationalRewards:
    """The mean of the aspects that apply, as (mean - 1) / 3; each aspect is a component, too.

    server, template, longest, max_tokens: as in `vlm_judge.VLMJudge`.
    """

    name = "rational_rewards"
    components = ("score", *ASPECTS)
    bounds = (0.0, 1.0)
    requests_per_image = 1
    differentiable = False
    deterministic = False

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        *,
        template: str = ASK,
        longest: int = 512,
        max_tokens: int = 2048,
    ):
        check_template(template)
        self.chat, self.template = connected(server), template
        self.longest, self.max_tokens = longest, max_tokens
        said = digest(template, max_tokens)
        self.version = f"rational_rewards-1/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """images (B, 3, H, W) in [0, 1] -> (B scores by component, reasons of missing ones)."""
        questions = questions_of(
            images, prompts, self.template, self.longest, max_tokens=self.max_tokens
        )
        return scored_parts(self.judge, self.chat.ask(questions), self.components)

    def judge(self, reply: Reply) -> dict[str, float]:
        """The scores of one reply, NaN for what does not apply. Raises ValueError without them."""
        aspects = aspect_scores(reply.heard().text)
        known = {name: share(value) for name, value in aspects.items() if value is not None}
        none = dict.fromkeys(ASPECTS, float("nan"))
        return none | known | {"score": sum(known.values()) / len(known)}

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows the model."""
        return red_and_blue()


def share(score: float) -> float:
    """A score in [1, 4] as one in [0, 1]."""
    return (score - LOWEST) / (HIGHEST - LOWEST)

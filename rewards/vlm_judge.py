"""A vision-language model says how well an image shows its prompt.

Three ways to ask, all with a template of one's own: the expectation over score tokens (continuous,
one token), yes or no (VQAScore, arXiv 2404.01291), or a text that ends in a score.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Reply, check_template, digest, questions_of, scored, text_score
from .chat.token_mass import (
    ALTERNATIVES,
    LEAST_MASS,
    check_first_tokens,
    expectation,
    spelled,
)
from .prompt_fixtures import red_and_blue

ASK_SCORE = (
    'Somebody asked for a picture of this: "{prompt}"\nHow well does the picture do it? Look at '
    "what is asked for first, at how well it is made second. Answer with exactly one of {answers} "
    "and nothing else; {answers} go from the worst to the best."
)
ASK_YES = 'Does this picture show "{prompt}"? Answer with yes or no and nothing else.'
ASK_TEXT = (
    'Somebody asked for a picture of this: "{prompt}"\nSay in a few sentences what of it the '
    "picture shows, what is missing and how well it is made. Then end with a whole number from "
    "{lowest} (useless) to {highest} (perfect), written as <Score>number</Score>."
)
# What Flow-GRPO's reward `qwenvl` asks, in other words: 0 to 5 for all that the caption mentions,
# thoughts first, and the score in the same tags.
ASK_QWENVL = (
    "Here is a generated picture and its caption. Judge how well they match on 0 to 5: 5, every "
    "object, attribute and relation of the caption is there, and exact; 4, a small detail is off; "
    "3, the main things are right, several details are not; 2, a main thing is wrong; 1, little of "
    "it; 0, nothing.\nWrite what you see in <Thought> </Thought>, and then the number in <Score> "
    "</Score>.\nText Caption: [{prompt}]"
)
MODES = {
    "expectation": ASK_SCORE,
    "yes_no": ASK_YES,
    "text": ASK_TEXT,
    "qwenvl": ASK_QWENVL,
}
READS_TEXT = ("text", "qwenvl")
PATTERN = r"<Score>\s*([^<]*?)\s*</Score>"
TO_FIVE: Mapping[str, float] = {str(n): float(n) for n in range(6)}
YES: Mapping[str, float] = {"yes": 1.0, "no": 0.0}


def _check_pattern(pattern: str) -> None:
    """Raises ValueError unless it is a regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern is {pattern!r}, no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"pattern must have one group, around the score, not {groups}")


class VLMJudge:
    """The model's score divided by the best possible one; NaN with a reason where it gives none.

    server: what `chat.client.Chat` takes, at least the model. mode: "expectation" over the
    tokens of `scores`, by default 0 to 5 (each must be one token, which letters are; none may begin
    as another does, since "10" may arrive as "1");
    "yes_no", P(yes) of what lies on yes and no (VQAScore takes P(yes) of everything: the same where
    nothing else is said); "text", the score that `pattern` finds; "qwenvl", the same with the
    rubric of Flow-GRPO's reward of that name. template: the question, with
    {prompt} where the prompt goes. longest: pixels of an image's longer side, at most. min_mass:
    the least probability that must lie on accepted tokens.
    """

    requests_per_image = 1
    differentiable = False
    deterministic = False  # greedy answers still depend on what else a server works on

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        mode: str = "expectation",
        *,
        scores: Mapping[str, float] | None = None,
        template: str | None = None,
        pattern: str = PATTERN,
        longest: int = 512,
        max_tokens: int = 256,
        min_mass: float = LEAST_MASS,
    ):
        if mode not in MODES:
            raise ValueError(f"VLM judge mode is one of {', '.join(MODES)}, not {mode!r}")
        given = YES if mode == "yes_no" else scores or TO_FIVE
        self.scores = {str(answer): float(score) for answer, score in given.items()}
        if len({spelled(answer) for answer in self.scores}) < max(2, len(self.scores)):
            raise ValueError(f"scores need two or more different answers, not {self.scores}")
        if mode not in READS_TEXT:
            check_first_tokens(self.scores)
        _check_pattern(pattern)
        self.lowest, self.highest = min(self.scores.values()), max(self.scores.values())
        if self.highest <= 0:
            raise ValueError(f"the best of the scores must be above 0, not {self.highest:g}")
        self.chat, self.mode, self.min_mass = connected(server), mode, min_mass
        self.pattern, self.longest, self.max_tokens = pattern, longest, max_tokens
        self.template = (template or MODES[mode]).replace(
            "{answers}", ", ".join(sorted(self.scores, key=self.scores.__getitem__))
        )
        for key, value in (("{lowest}", self.lowest), ("{highest}", self.highest)):
            self.template = self.template.replace(key, f"{value:g}")
        check_template(self.template)
        self.name = "vlm_judge" if mode == "expectation" else f"vlm_judge_{mode}"
        self.bounds = (self.lowest / self.highest, 1.0)
        said = digest(self.template, self.scores, pattern, max_tokens, min_mass)
        self.version = f"vlm_judge-1/{mode}/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """images (B, 3, H, W) in [0, 1] -> (B scores, reasons of those that are missing)."""
        text = self.mode in READS_TEXT
        questions = questions_of(
            images, prompts, self.template, self.longest,
            max_tokens=self.max_tokens if text else 1, alternatives=0 if text else ALTERNATIVES,
        )  # fmt: skip
        return scored(self.judge, self.chat.ask(questions))

    def judge(self, reply: Reply) -> float:
        """The score of one reply. Raises ValueError when it has none."""
        reply.heard()
        if self.mode in READS_TEXT:
            score = text_score(reply.text, self.pattern, self.lowest, self.highest)
        else:
            score = expectation(reply.first, self.scores, self.min_mass)
        return score / self.highest

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows the model."""
        return red_and_blue()

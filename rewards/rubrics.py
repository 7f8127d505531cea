"""Rubrics of `vlm_judge`: what a vision-language model is asked, and how its answer is read.

A rubric is data: a question, the answers or patterns that hold scores, and the range of
these. Axes, scales and the form of answers are those of the source; the wording is flowrl's, except
for DeQA's. A model that was trained with one wording wants that one: pass it as
`question`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Scores = Mapping[str, float]

TO_FIVE: Scores = {str(n): float(n) for n in range(6)}
SCORE_TAG = r"<Score>\s*([^<]*?)\s*</Score>"
_NUMBER = r"[\s*]*(\d[\d.,/\u2013-]*(?:[\s*]*(?:/|out of)\s*\d+)?)"  # and what belongs to it


def mean(scores: Scores) -> float:
    return sum(scores.values()) / len(scores)


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """A question about one image, and how its answer becomes a score between 0 and 1.

    It may hold {prompt}; in a rubric of answer tokens {answers} stands for these, from the worst to
    the best. A rubric has either `tokens` or `patterns`: regular expressions with one group, around
    a number, of which the last match counts.
    """

    source: str  # a paper, a project, or "" for flowrl's own
    question: str
    tokens: Scores = field(default_factory=dict)  # answer of one token: its score
    patterns: Mapping[str, str] = field(default_factory=dict)  # by the score's name
    lowest: float = 0.0
    highest: float = 5.0  # becomes 1
    # Scores by name -> the rubric's score. Not in its text, where it has another address each time.
    combine: Callable[[Scores], float] = field(default=mean, repr=False)
    begins: str = ""  # start of the answer, which the model continues
    max_tokens: int = 256  # of a text answer

    @property
    def reads_text(self) -> bool:
        return bool(self.patterns)

    def normalise(self, score: float) -> float:
        return score / self.highest


def changed_rubric(rubric: Rubric, changes: Mapping[str, Any]) -> Rubric:
    """Return a rubric with other fields, written as plain data; scores of tokens set the range.

    Raises TypeError for unknown fields.
    """
    fields: dict[str, Any] = dict(changes)
    if "tokens" in fields:
        tokens = {str(answer): float(score) for answer, score in fields["tokens"].items()}
        scores = {"lowest": min(tokens.values()), "highest": max(tokens.values())}
        fields = scores | fields | {"tokens": tokens}
    return replace(rubric, **fields)


# --- one answer token, or a text with one score ---------------------------------------------------

EXPECTATION = Rubric(
    source="",
    question=(
        'Somebody asked for a picture of this: "{prompt}"\nHow well does the picture do it? Look '
        "at what is asked for first, at how well it is made second. Answer with exactly one of "
        "{answers} and nothing else; {answers} go from the worst to the best."
    ),
    tokens=TO_FIVE,
)
YES_NO = Rubric(
    source="VQAScore, arXiv 2404.01291",
    question='Does this picture show "{prompt}"? Answer with yes or no and nothing else.',
    tokens={"yes": 1.0, "no": 0.0},
    highest=1.0,
)
TEXT = Rubric(
    source="",
    question=(
        'Somebody asked for a picture of this: "{prompt}"\nSay in a few sentences what of it the '
        "picture shows, what is missing and how well it is made. Then end with a whole number from "
        "0 (useless) to 5 (perfect), written as <Score>number</Score>."
    ),
    patterns={"score": SCORE_TAG},
)
QWENVL = Rubric(
    source="Flow-GRPO's reward qwenvl, arXiv 2505.05470",
    question=(
        "Here is a generated picture and its caption. Judge how well they match on 0 to 5: 5, "
        "every object, attribute and relation of the caption is there, and exact; 4, a small "
        "detail is off; 3, the main things are right, several details are not; 2, a main thing is "
        "wrong; 1, little of it; 0, nothing.\nWrite what you see in <Thought> </Thought>, and then "
        "the number in <Score> </Score>.\nText Caption: [{prompt}]"
    ),
    patterns={"score": SCORE_TAG},
)
# The server continues a begun answer, as vLLM does; DeQA saw images of 448 pixels.
DEQA = Rubric(
    source="DeQA-Score, arXiv 2501.11561",
    question="How would you rate the quality of this image?",
    begins="The quality of the image is",
    tokens={"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0},
    lowest=1.0,
)


# --- judges of published benchmarks ---------------------------------------------------------------


def wiscore(scores: Scores) -> float:
    """Return WISE's WiScore before it is divided by the highest score, 2 (its Calculate.py)."""
    return 0.7 * scores["consistency"] + 0.2 * scores["realism"] + 0.1 * scores["aesthetic_quality"]


WISE = Rubric(
    source="WISE, arXiv 2503.07265",
    question=(
        "The picture was generated for a prompt that takes knowledge to understand. Rate three "
        "things, strictly, in doubt with the lower score. Consistency: 0, a main thing is missing "
        "or contradicted; 1, part of it is shown; 2, every detail of what it means. Realism: 0, "
        "plainly artificial or impossible; 1, small faults; 2, like a photograph. Aesthetic "
        "Quality: 0, unappealing; 1, decent; 2, masterly.\nWrite exactly these lines:\n"
        "Consistency: X\nRealism: X\nAesthetic Quality: X\nPrompt: {prompt}"
    ),
    patterns={
        axis.lower().replace(" ", "_"): rf"{axis}\**:{_NUMBER}"
        for axis in ("Consistency", "Realism", "Aesthetic Quality")
    },
    highest=2.0,
    combine=wiscore,
)
# Five levels of 20 points, as its Share_eval.py has them for relations, numbers and complex
# prompts; for attributes it asks about each object, found by spaCy.
T2I_COMPBENCH = Rubric(
    source="T2I-CompBench++, arXiv 2307.06350",
    question=(
        "The picture was generated for this prompt: {prompt}\nHow well do objects, numbers, "
        "colours, shapes, textures, places and actions match? 5, perfectly; 4, but for small "
        "things; 3, key parts are missing or mixed up; 2, little of it; 1, nearly nothing.\nAnswer "
        'with JSON alone: {"score": a whole number, "explanation": "at most 20 words"}.'
    ),
    patterns={"score": r'"score"\s*:\s*"?\s*([^",}]*?)\s*[",}]'},
    lowest=1.0,
)
RUBRICS = {
    "expectation": EXPECTATION,
    "yes_no": YES_NO,
    "text": TEXT,
    "qwenvl": QWENVL,
    "deqa": DEQA,
    "wise": WISE,
    "t2i_compbench": T2I_COMPBENCH,
}

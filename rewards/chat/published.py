"""Judges of published benchmarks: what their authors ask, with more metadata than a prompt."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..fixtures import fixture, square
from ..vlm_judge import VLMJudge
from ..vlm_questions import VLMQuestions
from .messages import Reply


def graph_score(answers: Sequence[bool], parents: Sequence[Sequence[int]], chain: bool) -> float:
    """Return the share of questions answered yes; one with a parent answered no counts 0.

    Args:
        parents: of each question, places in `answers`.
        chain: a parent that counts 0 is a no too, for the questions after it (DPG-Bench, arXiv
            2403.05135, compute_dpg_bench.py); otherwise its own answer decides (OneIG-Bench, arXiv
            2506.07977, alignment_score.py).
    """
    counted = list(answers)
    for question, above in enumerate(parents):
        source = counted if chain else answers
        counted[question] = answers[question] and all(source[parent] for parent in above)
    return sum(counted) / len(counted)


class QuestionGraph(VLMQuestions):
    """The share of yes to questions that depend on each other, see `graph_score`.

    metadata["question_graph"]: [[question, [places of its parents in the list]], ...]. An answer is
    yes when yes holds more than half of the probability. Other arguments: of `VLMQuestions`.
    """

    required_metadata = ("question_graph",)

    def __init__(self, server: Any = None, *, chain: bool = True, **args: Any):
        args.setdefault("template", "{question} Answer with yes or no.")
        super().__init__(server, **args)
        self.chain, self.name = chain, "question_graph"
        self.version = f"question_graph-1/{chain}/{self.version}"

    def check(self, prompt: str, metadata: dict) -> None:
        """Raise ValueError when the graph has another form."""
        graph = metadata["question_graph"]
        if not graph or not all(set(parents) <= {*range(len(graph))} for _, parents in graph):
            raise ValueError(f"question_graph is {graph!r}, expected [[question, [parents]], ...]")

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score images (B, 3, H, W) in [0, 1]: (B scores, reasons of those that are missing)."""
        lists = [{"vqa_list": data["question_graph"]} for data in metadata]
        return super().__call__(images, prompts, lists)

    def judge(self, answered: Sequence[tuple[Any, Reply]]) -> float:
        """Return the score of (places of parents, reply) pairs."""
        answers = [self._atom("yes", reply) > 0.5 for _, reply in answered]
        return graph_score(answers, [parents for parents, _ in answered], self.chain)

    def fixtures(self) -> list[dict]:
        graph = [["Is there a square?", []], ["Is the square red?", [0]]]
        metadata = {"question_graph": graph}
        return [fixture("red is red", square("red"), square("blue"), "a red square", metadata)]


class ExplainedJudge(VLMJudge):
    """`VLMJudge` that is told what a prompt means where metadata["Explanation"] says it (WISE)."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score images (B, 3, H, W) in [0, 1]: (B scores, reasons of missing ones)."""
        texts = [
            f"{prompt}\nWhat a right picture shows: {data['Explanation']}"
            if data.get("Explanation") else prompt
            for prompt, data in zip(prompts, metadata, strict=True)
        ]  # fmt: skip
        return super().__call__(images, texts, metadata)

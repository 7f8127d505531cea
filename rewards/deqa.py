"""DeQA-Score: how good the quality of an image is, whatever it shows (arXiv 2501.11561).

The model goes on from "The quality of the image is" with one of five words; the score is the mean
of their levels under its probabilities. Model and code are under the MIT licence. It needs a server
that continues a begun answer and tells log-probabilities, as vLLM does with models that it knows;
where the model runs in an environment of its own only, see docs/reward-servers.md.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .chat.client import Chat, connected
from .chat.messages import Question, Reply, digest, scored
from .chat.token_mass import ALTERNATIVES, LEAST_MASS, expectation
from .fixtures import fixture, noise, square
from .images import pngs

QUESTION = "How would you rate the quality of this image?"
BEGINS = "The quality of the image is"
LEVELS: Mapping[str, float] = {"excellent": 5, "good": 4, "fair": 3, "poor": 2, "bad": 1}


class DeQA:
    """The expected level, 1 to 5, divided by 5. The prompt is not read.

    server, longest, min_mass: as in `vlm_judge.VLMJudge`; the model saw images of 448 pixels.
    """

    name = "deqa"
    bounds = (0.2, 1.0)
    requests_per_image = 1
    differentiable = False
    deterministic = False

    def __init__(
        self,
        server: Chat | Mapping[str, Any] | None = None,
        *,
        longest: int = 448,
        min_mass: float = LEAST_MASS,
    ):
        self.chat, self.longest, self.min_mass = connected(server), longest, min_mass
        said = digest(QUESTION, BEGINS, min_mass)
        self.version = f"deqa-1/{said}/{longest}px/{self.chat.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """images (B, 3, H, W) in [0, 1] -> (B scores, reasons of those that are missing)."""
        questions = [
            Question(images=(image,), text=QUESTION, alternatives=ALTERNATIVES, begins=BEGINS)
            for image in pngs(images, self.longest)
        ]
        return scored(self.judge, self.chat.ask(questions))

    def judge(self, reply: Reply) -> float:
        """The score of one reply. Raises ValueError when it has none."""
        return expectation(reply.heard().first, LEVELS, self.min_mass) / max(LEVELS.values())

    def fixtures(self) -> list[dict]:
        return [fixture("a clean square is of better quality than noise", square("red"), noise())]

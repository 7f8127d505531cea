"""Preference: which of two images a person liked, read from a store of pairs."""

from torch import Tensor


class Preference:
    """1 for the chosen image of a pair and 0 for the other; known for stored images alone.

    It names a column of scores, and applies to no generated image.
    """

    name = "preference"
    bounds = (0.0, 1.0)
    differentiable = False
    version = "preference-1"

    def applies(self, prompt: str, metadata: dict) -> bool:
        return False

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        raise RuntimeError(
            "preferences are read from a store of pairs and cannot be computed: set "
            "rollout.store.path, or use another reward"
        )

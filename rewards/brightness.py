"""Brightness: the smallest complete reward, a pattern for your own."""

from torch import Tensor

from .fixtures import blank, fixture, noise


class Brightness:
    """The mean pixel value, in [0, 1]: rewards bright images."""

    name = "brightness"
    bounds = (0.0, 1.0)
    differentiable = True
    version = "brightness-1"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return images.float().flatten(1).mean(1)

    def fixtures(self) -> list[dict]:
        return [fixture("blank paper scores above noise", blank(), noise())]

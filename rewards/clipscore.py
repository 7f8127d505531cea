"""CLIPScore: how well an image fits its prompt (Hessel et al. 2021, arXiv 2104.08718).

The cosine of OpenAI's CLIP ViT-L/14 (428 M parameters, 1.7 GB in fp32), neither rescaled by 2.5
nor cut at 0 as in the paper: the form that alignment papers train on and report. Weights under the
MIT licence.
"""

from typing import Any

from torch import Tensor

from .fixtures import red_and_blue
from .networks.clip import VIT_L14, Clip
from .networks.preprocess import NAME


class CLIPScore:
    """The cosine of image and prompt, for images of the prompt about 0.2 to 0.35.

    Prompts are cut at 77 tokens. model: a name on the Hugging Face hub, or a folder. clip: other
    arguments of `Clip`: revision, device, dtype.
    """

    name = "clipscore"
    bounds = (-1.0, 1.0)
    differentiable = True
    fixtures = staticmethod(red_and_blue)

    def __init__(self, *, model: str = VIT_L14, **clip: Any):
        self.clip = Clip(model, reward="CLIPScore", **clip)
        self.version = f"clipscore-1/{self.clip.version}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return self.clip.cosine(images, prompts)

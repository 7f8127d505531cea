"""PickScore: which image people would pick for a prompt (Kirstain et al. 2023, 2305.01569).

A CLIP ViT-H/14 (986 M parameters: 3.9 GB in fp32, 2.0 GB in bf16) tuned on people's choices.
"""

from typing import Any

from torch import Tensor

from .fixtures import red_and_blue
from .networks.clip import Clip
from .networks.preprocess import NAME

MODEL = "yuvalkirstain/PickScore_v1"
TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
SCALES = ("div26", "raw", "cosine")
LARGEST = 100.0  # CLIP bounds exp(logit_scale) while it is trained


class PickScore:
    """The cosine of image and prompt, times exp(logit_scale): about 18 to 24.

    scale "div26" divides that by 26, as Flow-GRPO and DiffusionNFT train on (about 0.7 to 0.9);
    "raw" leaves it; "cosine" is the cosine alone, about 0.2. Prompts are cut at 77 tokens.
    model, tokenizer: names on the Hugging Face hub, or folders. clip: other arguments of `Clip`:
    revision, device, dtype.
    """

    name = "pickscore"
    differentiable = True
    fixtures = staticmethod(red_and_blue)

    def __init__(
        self, scale: str = "div26", *, model: str = MODEL, tokenizer: str = TOKENIZER, **clip: Any
    ):
        if scale not in SCALES:
            raise ValueError(f"PickScore's scale is one of {', '.join(SCALES)}, not {scale!r}")
        self.scale = scale
        self.clip = Clip(model, reward="PickScore", tokenizer=tokenizer, **clip)
        self.version = f"pickscore-1/{scale}/{self.clip.version}/{NAME}"
        largest = {"div26": LARGEST / 26, "raw": LARGEST, "cosine": 1.0}[scale]
        self.bounds = (-largest, largest)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        cosine = self.clip.cosine(images, prompts)
        if self.scale == "cosine":
            return cosine
        raw = self.clip.scale * cosine
        return raw / 26 if self.scale == "div26" else raw

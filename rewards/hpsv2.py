"""HPSv2.1: which image people prefer for a prompt (Wu et al. 2023, arXiv 2306.09341).

An open_clip ViT-H-14 (986 M parameters, 3.9 GB in fp32) with the authors' weights. It sees the
whole image: the longest side is resized and the rest is black.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fixtures import red_and_blue
from .networks.clip import cosine
from .networks.loading import (
    DTYPES,
    building,
    check_dtype,
    device_of,
    fit,
    imported,
    read_weights,
    weights_file,
)
from .networks.preprocess import NAME, hps_pixels
from .networks.text_embeddings import TextEmbeddings, warn_of_cut

MODEL = "xswu/HPSv2"
FILE = "HPS_v2.1_compressed.pt"
ARCHITECTURE = "ViT-H-14"  # with GELU: only OpenAI's own weights want QuickGELU


class HPSv2:
    """The cosine of image and prompt, without CLIP's logit scale: about 0.2 to 0.35.

    Prompts are cut at 77 tokens.
    model: a name on the Hugging Face hub, a folder with the file HPS_v2.1_compressed.pt, or such a
    file. architecture: a name open_clip knows.
    """

    name = "hpsv2"
    bounds = (-1.0, 1.0)
    differentiable = True
    fixtures = staticmethod(red_and_blue)

    def __init__(
        self,
        *,
        model: str = MODEL,
        architecture: str = ARCHITECTURE,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.model, self.architecture = model, architecture
        self.revision, self.device, self.dtype = revision, device, check_dtype(dtype)
        self.texts = TextEmbeddings(self._encode)
        named = f"{model}@{revision}" if revision else model
        self.version = f"hpsv2-1/v2.1/{named}/{architecture}/{dtype}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        network = self._network
        pixels = hps_pixels(images.to(self._device), network.visual.image_size[0])
        vectors = network.encode_image(pixels.to(DTYPES[self.dtype]))
        return cosine(F.normalize(vectors.float(), dim=-1), self.texts(prompts))

    def _encode(self, prompts: list[str]) -> Tensor:
        tokens = self._tokenizer(prompts)
        longest = max(len(prompt.encode()) for prompt in prompts) + 2  # a token a byte at most
        whole = self._tokenizer(prompts, context_length=longest)
        lengths = whole.argmax(-1) + 1  # the end has the highest number
        warn_of_cut("HPSv2", prompts, lengths.tolist(), tokens.shape[1])
        vectors = self._network.encode_text(tokens.to(self._device))
        return F.normalize(vectors.float(), dim=-1)

    @functools.cached_property
    def _device(self) -> torch.device:
        return device_of(self.device)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return imported("open_clip", "HPSv2").get_tokenizer(self.architecture)

    @functools.cached_property
    def _network(self) -> Any:
        open_clip = imported("open_clip", "HPSv2")
        path = weights_file(self.model, FILE, self.revision)
        config = open_clip.get_model_config(self.architecture)
        if config is None:
            raise ValueError(f"open_clip knows no architecture {self.architecture!r}")
        with building():
            network = open_clip.CLIP(**config)
        fit(network, read_weights(path), path, f"open_clip's {self.architecture}")
        return network.eval().requires_grad_(False).to(self._device, DTYPES[self.dtype])

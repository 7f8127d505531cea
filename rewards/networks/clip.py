"""A CLIP of transformers: images and prompts as unit vectors, compared row by row."""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .loading import DTYPES, building, check_dtype, device_of, fetching, imported, text_tokenizer
from .preprocess import clip_pixels
from .sharing import shared
from .text_embeddings import TextEmbeddings, warn_of_cut

VIT_L14 = "openai/clip-vit-large-patch14"  # OpenAI's largest at 224 pixels: what papers compare by


def cosine(images: Tensor, texts: Tensor) -> Tensor:
    """Of unit vectors, row i with row i: (B, D), (B, D) -> (B,). Never a (B, B) matrix."""
    return (images * texts).sum(-1)


class _Loaded(NamedTuple):
    network: Any  # a CLIPModel of transformers
    scale: float


class Clip:
    """A CLIP by its name on the Hugging Face hub, or in a folder; loaded when first used.

    Rewards of a process that use the same weights share one network, which runs once for the same
    images. The weights get no gradient, the images do.

    Args:
        reward: named in messages.
        tokenizer: a name on the hub or a folder, where it is not with the model.
        dtype: of the network, "fp32" or "bf16"; vectors and their products are float32.
    """

    def __init__(
        self,
        model: str,
        *,
        reward: str,
        tokenizer: str = "",
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.model, self.tokenizer, self.revision = model, tokenizer or model, revision
        self.reward, self.device, self.dtype = reward, device, check_dtype(dtype)
        self.texts = TextEmbeddings(self._encode)
        self._shared = shared(("clip", model, revision, device, dtype), self)

    @property
    def version(self) -> str:
        """Return what changes its vectors, in one string."""
        named = f"{self.model}@{self.revision}" if self.revision else self.model
        return f"{named}/{self.dtype}"

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        return self._shared.load(self._load)

    def _load(self) -> _Loaded:
        kind = imported("transformers:CLIPModel", self.reward)
        with building(), fetching(self.model):
            network = kind.from_pretrained(self.model, revision=self.revision)
        scale = network.logit_scale.detach().float().exp().item()  # bf16 would shift it by 1 %
        network = network.eval().requires_grad_(False)
        network = network.to(device_of(self.device), DTYPES[self.dtype])
        return _Loaded(network, scale)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        revision = self.revision if self.tokenizer == self.model else None
        return text_tokenizer(self.tokenizer, self.reward, revision)

    @property
    def scale(self) -> float:
        """Return exp(logit_scale): what the model multiplies cosines with."""
        return self._loaded.scale

    def images(self, images: Tensor) -> Tensor:
        """Return unit vectors of images (B, 3, H, W) in [0, 1]: (B, D) float32 on the model's
        device.
        """
        return self._shared.recall("images", images, lambda: self._seen(images))

    def _seen(self, images: Tensor) -> Tensor:
        network = self._loaded.network
        size = network.config.vision_config.image_size
        pixels = clip_pixels(images.to(network.device), size).to(network.dtype)
        return _unit(network.get_image_features(pixel_values=pixels))

    def cosine(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Return similarity of each image and its own prompt: (B, 3, H, W), B prompts -> (B,)."""
        return cosine(self.images(images), self.texts(prompts))

    def _encode(self, prompts: list[str]) -> Tensor:
        key = (self.tokenizer, *prompts)
        return self._shared.recall(key, None, lambda: self._read(prompts))

    def _read(self, prompts: list[str]) -> Tensor:
        network = self._loaded.network
        limit = network.config.text_config.max_position_embeddings
        whole = self._tokenizer(prompts, verbose=False)["input_ids"]
        warn_of_cut(self.reward, prompts, [len(ids) for ids in whole], limit)
        tokens = self._tokenizer(
            prompts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        ).to(network.device)
        return _unit(network.get_text_features(**tokens))


def _unit(output: Any) -> Tensor:
    # transformers 4 returns the vector, transformers 5 an output that holds it.
    vector = output if isinstance(output, Tensor) else output.pooler_output
    return F.normalize(vector.to(torch.float32), dim=-1)

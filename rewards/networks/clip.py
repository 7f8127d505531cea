"""A CLIP of transformers: images and prompts as unit vectors, compared row by row."""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .loading import DTYPES, building, check_dtype, device_of, fetching, imported, text_tokenizer
from .open_clip_layout import PREFIXES, load_open_clip
from .preprocess import Preprocess
from .sharing import shared
from .text_embeddings import TextEmbeddings, warn_of_cut

VIT_L14 = "openai/clip-vit-large-patch14"  # OpenAI's largest at 224 pixels: what papers compare by


def cosine(images: Tensor, texts: Tensor) -> Tensor:
    """Of unit vectors, row i with row i: (B, D), (B, D) -> (B,). Never a (B, B) matrix."""
    return (images * texts).sum(-1)


def projected(output: Any) -> Tensor:
    """The vector of get_image_features or get_text_features.

    transformers 4 returns it, transformers 5 an output that holds it as `pooler_output`.
    """
    return output if isinstance(output, Tensor) else output.pooler_output


class _Loaded(NamedTuple):
    network: Any  # a CLIPModel of transformers
    scale: float
    preprocess: Preprocess


class Clip:
    """A CLIP by its name on the Hugging Face hub, or in a folder; loaded when first used.

    One that open_clip wrote is "hf-hub:owner/name" or "local-dir:folder", as open_clip names it;
    its prompts are read by open_clip's own tokenizer.

    Rewards of a process that use the same weights hold one network, which is run once for the same
    images. reward: who uses it, for messages. tokenizer: where that lies, if not with the model.
    dtype "fp32" or "bf16": of the network; vectors and their products are float32. The weights
    get no gradient, the images do.
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
        """What changes its vectors, in one string."""
        named = f"{self.model}@{self.revision}" if self.revision else self.model
        return f"{named}/{self.dtype}"

    @property
    def _of_open_clip(self) -> bool:
        return self.tokenizer.startswith(PREFIXES)

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        return self._shared.load(self._load)

    def _load(self) -> _Loaded:
        if self.model.startswith(PREFIXES):
            found = load_open_clip(self.model, self.revision, self.reward)
            network, preprocess = found.network, found.preprocess
        else:
            kind, preprocess = imported("transformers:CLIPModel", self.reward), Preprocess()
            with building(), fetching(self.model):
                network = kind.from_pretrained(self.model, revision=self.revision)
        scale = network.logit_scale.detach().float().exp().item()  # bf16 would shift it by 1 %
        network = network.eval().requires_grad_(False)
        network = network.to(device_of(self.device), DTYPES[self.dtype])
        return _Loaded(network, scale, preprocess)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        if self._of_open_clip:
            return imported("open_clip:SimpleTokenizer", self.reward)()
        revision = self.revision if self.tokenizer == self.model else None
        return text_tokenizer(self.tokenizer, self.reward, revision)

    @property
    def scale(self) -> float:
        """exp(logit_scale): what the model multiplies cosines with."""
        return self._loaded.scale

    def images(self, images: Tensor) -> Tensor:
        """Unit vectors of images (B, 3, H, W) in [0, 1]: (B, D) float32 on the model's device."""
        return self._shared.recall("images", images, lambda: self._seen(images))

    def _seen(self, images: Tensor) -> Tensor:
        network, _, preprocess = self._loaded
        size = network.config.vision_config.image_size
        pixels = preprocess(images.to(network.device), size).to(network.dtype)
        return _unit(network.get_image_features(pixel_values=pixels))

    def cosine(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Similarity of each image and its own prompt: (B, 3, H, W), B prompts -> (B,)."""
        return cosine(self.images(images), self.texts(prompts))

    def _encode(self, prompts: list[str]) -> Tensor:
        asked = (self.tokenizer, *prompts)
        return self._shared.recall(asked, None, lambda: self._read(prompts))

    def _read(self, prompts: list[str]) -> Tensor:
        network = self._loaded.network
        tokens, mask = self._tokens(prompts, network.config.text_config.max_position_embeddings)
        mask = None if mask is None else mask.to(network.device)
        found = network.get_text_features(input_ids=tokens.to(network.device), attention_mask=mask)
        return _unit(found)

    def _tokens(self, prompts: list[str], limit: int) -> tuple[Tensor, Tensor | None]:
        """Numbers (B, L), and which are text; None where nothing reads what follows the end."""
        if self._of_open_clip:
            lengths = [len(self._tokenizer.encode(prompt)) + 2 for prompt in prompts]
            warn_of_cut(self.reward, prompts, lengths, limit)
            return self._tokenizer(prompts, context_length=limit), None
        whole = self._tokenizer(prompts, verbose=False)["input_ids"]
        warn_of_cut(self.reward, prompts, [len(ids) for ids in whole], limit)
        tokens = self._tokenizer(
            prompts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        return tokens["input_ids"], tokens["attention_mask"]


def _unit(output: Any) -> Tensor:
    return F.normalize(projected(output).to(torch.float32), dim=-1)

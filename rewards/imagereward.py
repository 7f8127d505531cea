"""ImageReward: which image people prefer for a prompt (Xu et al. 2023, arXiv 2304.05977).

A BLIP ViT-L with cross-attention (450 M parameters) from the authors' package `image-reward`. That
package asks for old versions of others and wants an environment of its own: start `flowrl
reward-serve` there and score through it, see docs/reward-servers.md.

Tested against the interface of that package alone, not with its weights.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from .networks.loading import building, device_of, fetching, imported
from .networks.preprocess import NAME, clip_pixels
from .networks.text_embeddings import warn_of_cut

MODEL = "ImageReward-v1.0"
REPOSITORY = "THUDM/ImageReward"  # where the package fetches that from
TOKENS = 35  # what its text encoder was trained to read
SIZE = 224
HINT = "ImageReward (in an environment of its own, see docs/reward-servers.md)"


class ImageReward:
    """The standardised score, about -2 to 2. Prompts are cut at 35 tokens, with a warning.

    Every image meets its own prompt alone: B pairs cost B passes. model: a name that the package
    knows, or the path of its checkpoint.
    """

    name = "imagereward"
    bounds = (None, None)
    differentiable = False

    def __init__(self, *, model: str = MODEL, device: str = "auto"):
        self.model, self.device = model, device
        self.version = f"imagereward-1/{model}/fp32/{NAME}"

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32."""
        network, device = self._network, device_of(self.device)
        text = self._tokens(prompts, network.blip.tokenizer).to(device)
        seen = network.blip.visual_encoder(clip_pixels(images.to(device), SIZE))
        read = network.blip.text_encoder(
            text.input_ids,
            attention_mask=text.attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long, device=device),
            return_dict=True,
        )
        raw = network.mlp(read.last_hidden_state[:, 0].float()).squeeze(-1)
        return (raw - network.mean) / network.std

    def fixtures(self) -> list[dict]:
        from .prompt_fixtures import red_and_blue

        return red_and_blue()

    def _tokens(self, prompts: list[str], tokenizer: Any) -> Any:
        lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
        warn_of_cut("ImageReward", prompts, lengths, TOKENS)
        return tokenizer(
            prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )

    @functools.cached_property
    def _network(self) -> Any:
        load = imported("ImageReward:load", HINT)
        repository = REPOSITORY if self.model == MODEL else self.model
        with building(), fetching(repository):
            network = load(self.model, device=str(device_of(self.device)))
        return network.eval().requires_grad_(False)

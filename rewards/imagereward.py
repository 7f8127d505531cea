"""ImageReward: which image people prefer for a prompt (Xu et al. 2023, arXiv 2304.05977).

A BLIP ViT-L/16 whose text network looks at the image, and a head of five linear layers (446 M
parameters, 1.8 GB in fp32; code and weights Apache-2.0). BLIP's parts are transformers' own: the
published file is read under its own names, see `to_transformers`, and needs no other package.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fixtures import red_and_blue
from .networks.linear_head import linear_head
from .networks.loading import (
    DTYPES,
    building,
    check_dtype,
    device_of,
    fit,
    imported,
    read_weights,
    text_tokenizer,
    under,
    weights_file,
)
from .networks.preprocess import NAME, clip_pixels
from .networks.sharing import shared
from .networks.text_embeddings import warn_of_cut

MODEL = "THUDM/ImageReward"
FILE = "ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
TOKENS = 35  # what its text network was trained to read
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of raw scores, in the published code
WIDTHS, LAYERS = (1024, 128, 64, 16, 1), (0, 2, 4, 6, 7)  # of the head; dropout has numbers too
SEES, READS = "blip.visual_encoder.", "blip.text_encoder."
VISION_EPS, TEXT_EPS = 1e-6, 1e-12  # of layer norms: not transformers' defaults
# Names of timm's vision transformer, and those of BlipVisionModel.
TOPS = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
BLOCK = {
    "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip
HEAD_WIDTH = 64  # of attention, in all of them


class ImageReward:
    """The standardised score, about -2 to 2. Prompts are cut at 35 tokens, with a warning.

    Every image meets its own prompt alone: B pairs cost B passes.
    model: a name on the Hugging Face hub, a folder with the file ImageReward.pt, or such a file.
    tokenizer: BERT's, a name there or a folder.
    """

    name = "imagereward"
    bounds = (None, None)
    differentiable = True
    fixtures = staticmethod(red_and_blue)

    def __init__(
        self,
        *,
        model: str = MODEL,
        tokenizer: str = TOKENIZER,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.model, self.tokenizer, self.revision = model, tokenizer, revision
        self.device, self.dtype = device, check_dtype(dtype)
        self._shared = shared(("imagereward", model, revision, device, dtype), self)
        named = f"{model}@{revision}" if revision else model
        self.version = f"imagereward-2/{named}/{dtype}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Score images (B, 3, H, W) in [0, 1]: (B,) float32."""
        return self._shared.recall(tuple(prompts), images, lambda: self._scores(images, prompts))

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        vision, text, head = self._loaded
        tokens = self._tokens(prompts).to(vision.device)
        pixels = clip_pixels(images.to(vision.device), vision.config.image_size)
        seen = vision(pixel_values=pixels.to(vision.dtype)).last_hidden_state
        read = text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(
                seen.shape[:-1], dtype=torch.long, device=seen.device
            ),
        ).last_hidden_state[:, 0]
        return (head(read.float()).squeeze(-1) - MEAN) / STD

    def _tokens(self, prompts: list[str]) -> Any:
        lengths = [len(ids) for ids in self._tokenizer(prompts, verbose=False)["input_ids"]]
        warn_of_cut("ImageReward", prompts, lengths, TOKENS)
        return self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return text_tokenizer(self.tokenizer, "ImageReward")

    @functools.cached_property
    def _loaded(self) -> "_Networks":
        return self._shared.load(self._load)

    def _load(self) -> "_Networks":
        path = weights_file(self.model, FILE, self.revision)
        parts = build(read_weights(path), path)
        device, dtype = device_of(self.device), DTYPES[self.dtype]
        vision, text = (
            part.eval().requires_grad_(False).to(device, dtype)
            for part in (parts.vision, parts.text)
        )
        return _Networks(vision, text, parts.head.to(device))


class _Networks(NamedTuple):
    vision: Any  # a BlipVisionModel of transformers
    text: Any  # a BlipTextModel, which looks at what `vision` saw
    head: nn.Sequential


def build(state: Mapping[str, Tensor], path: Path) -> _Networks:
    """Return the three networks of a file in ImageReward's published layout, float32 on the CPU.

    Their sizes are those of the file. Raises ValueError of one sentence for another layout.
    """
    try:
        vision_size, text_size = sizes(state)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the weights of ImageReward: it lacks {error}; expected names "
            f"such as {SEES}cls_token and {READS}embeddings.word_embeddings.weight"
        ) from error
    head = linear_head(
        state, path, what="head of ImageReward",
        widths=(text_size["hidden_size"], *WIDTHS), prefix="mlp.layers.", numbers=LAYERS,
    )  # fmt: skip
    target = "transformers.models.blip.modeling_blip_text:BlipTextModel"
    see, of_seeing = (
        imported(f"transformers:BlipVision{n}", "ImageReward") for n in ("Model", "Config")
    )
    read, of_reading = (imported(t, "ImageReward") for t in (target, "transformers:BlipTextConfig"))
    with building():
        vision = see(of_seeing(**vision_size))
        text = read(of_reading(**text_size), add_pooling_layer=False)
    parts = to_transformers(state)
    fit(vision, parts["vision"], path, "ImageReward")
    fit(text, parts["text"], path, "ImageReward")
    return _Networks(vision, text, head)


def sizes(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of a BlipVisionConfig and a BlipTextConfig, told from shapes. Raises
    KeyError.
    """
    patches = state[SEES + "patch_embed.proj.weight"]  # (D, 3, patch, patch)
    width, patch = patches.shape[0], patches.shape[-1]
    vision = {
        "hidden_size": width, "num_attention_heads": max(1, width // HEAD_WIDTH),
        "num_hidden_layers": _count(state, SEES + "blocks."),
        "intermediate_size": state[SEES + "blocks.0.mlp.fc1.weight"].shape[0],
        "image_size": round((state[SEES + "pos_embed"].shape[1] - 1) ** 0.5) * patch,
        "patch_size": patch, "layer_norm_eps": VISION_EPS, "hidden_act": "gelu",
    }  # fmt: skip
    words, places = (
        state[f"{READS}embeddings.{name}_embeddings.weight"] for name in ("word", "position")
    )
    first = READS + "encoder.layer.0."
    text = {
        "vocab_size": words.shape[0], "hidden_size": words.shape[1],
        "num_attention_heads": max(1, words.shape[1] // HEAD_WIDTH),
        "num_hidden_layers": _count(state, READS + "encoder.layer."),
        "intermediate_size": state[first + "intermediate.dense.weight"].shape[0],
        "encoder_hidden_size": state[first + "crossattention.self.key.weight"].shape[1],
        "max_position_embeddings": places.shape[0], "layer_norm_eps": TEXT_EPS,
        "hidden_act": "gelu", "is_decoder": True,  # so that its layers have cross-attention
    }  # fmt: skip
    return vision, text


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the weights of the two networks, "vision" and "text", under transformers' names.

    What else the file holds (projections of BLIP's own training, positions) is not used.
    """
    text = under(state, READS)
    text.pop("embeddings.position_ids", None)
    vision = {_renamed(name): value for name, value in under(state, SEES).items()}
    return {"vision": vision, "text": text}


def _renamed(name: str) -> str:
    """Return the name of a weight of timm's vision transformer in BlipVisionModel."""
    if name in TOPS:
        return TOPS[name]
    module, _, part = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{TOPS.get(module, module)}.{part}"
    _, number, rest = module.split(".", 2)
    return f"encoder.layers.{number}.{BLOCK.get(rest, rest)}.{part}"

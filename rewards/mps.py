"""MPS: people's preferences in several respects (Zhang et al. 2024, CVPR, arXiv 2405.14705).

A CLIP ViT-H/14, and four layers in which the image looks at those tokens of its prompt that have to
do with a condition: words for what counts (1.1 G parameters, 4.3 GB in fp32; code MIT). The CLIP is
transformers' own; names and meaning of the weights are those of the published code. Released is the
model for the overall preference.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .networks.clip import cosine
from .networks.loading import (
    DTYPES,
    building,
    check_dtype,
    device_of,
    fetching,
    fit,
    imported,
    read_weights,
    text_tokenizer,
    weights_file,
)
from .networks.preprocess import NAME, clip_pixels
from .networks.sharing import shared
from .networks.text_embeddings import warn_of_cut

MODEL = "RE-N-Y/mpsv1"  # the authors' weights as plain tensors
FILE = "model.safetensors"
BASE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
CONDITION = (  # for the overall preference, of the published evaluation
    "light, color, clarity, tone, style, ambiance, artistry, shape, face, hair, hands, limbs, "
    "structure, instance, texture, quantity, attributes, position, number, location, word, things."
)
KEPT = 0.3  # of the largest likeness to the condition; tokens below are not looked at
LEGACY_END = 2  # makes transformers take the token with the highest number for a text's end
UNUSED = ("position_ids", "rotary_emb.inv_freq")  # buffers, which are computed here


class MPS:
    """exp(logit_scale) times the cosine of the prompt and of what the image saw in it.

    Prompts are cut at 77 tokens.
    condition: words for what counts. threshold: of the published evaluation; its training has 0.01.
    model: a name on the Hugging Face hub, a folder with the file model.safetensors, or a file of
    tensors. base: the CLIP whose sizes and tokenizer these are, a name there or a folder.
    """

    name = "mps"
    bounds = (-100.0, 100.0)
    differentiable = True

    def __init__(
        self,
        *,
        condition: str = CONDITION,
        threshold: float = KEPT,
        model: str = MODEL,
        base: str = BASE,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.condition, self.threshold = condition, threshold
        self.model, self.base, self.revision = model, base, revision
        self.device, self.dtype = device, check_dtype(dtype)
        self._shared = shared(("mps", model, revision, device, dtype), self)
        named = f"{model}@{revision}" if revision else model
        asked = "overall" if condition == CONDITION else condition
        self.version = f"mps-1/{named}/{asked}/{threshold:g}/{dtype}/{NAME}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32."""
        clip, cross, scale = self._loaded
        pixels = clip_pixels(images.to(clip.device), clip.config.vision_config.image_size)
        seen = clip.vision_model(pixel_values=pixels.to(clip.dtype)).last_hidden_state
        tokens, ends = self._read(prompts)
        keep = likeness(tokens, self._read([self.condition])[0]) > self.threshold
        found = cross(clip.visual_projection(seen), tokens, keep)[:, 0]
        return scale * cosine(*(F.normalize(part.float(), dim=-1) for part in (found, ends)))

    def fixtures(self) -> list[dict]:
        from .prompt_fixtures import red_and_blue

        return red_and_blue()

    def _read(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Vectors of all tokens, what follows the end too, and of the ends: (B, L, D), (B, D)."""
        clip = self._loaded.clip
        limit = clip.config.text_config.max_position_embeddings
        whole = self._tokenizer(prompts, verbose=False)["input_ids"]
        warn_of_cut("MPS", prompts, [len(ids) for ids in whole], limit)
        tokens = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=limit, return_tensors="pt"
        )
        with torch.no_grad():
            read = clip.text_model(input_ids=tokens["input_ids"].to(clip.device))
            return (
                clip.text_projection(read.last_hidden_state),
                clip.text_projection(read.pooler_output),
            )

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return text_tokenizer(self.base, "MPS")

    @functools.cached_property
    def _loaded(self) -> "_Networks":
        return self._shared.load(self._load)

    def _load(self) -> "_Networks":
        path = weights_file(self.model, FILE, self.revision)
        try:
            state = to_parts(read_weights(path))
        except ValueError as error:
            raise ValueError(
                f"{error}. The authors' MPS_overall_checkpoint.pth is a program: save its "
                "state_dict() where their code is, or take the file of " + MODEL
            ) from error
        kind, config = (imported(f"transformers:{n}", "MPS") for n in ("CLIPModel", "AutoConfig"))
        with building(), fetching(self.base, '--include "*.json" "*.txt"'):
            sizes = config.from_pretrained(self.base)
        sizes.text_config.eos_token_id = LEGACY_END
        with building():
            clip, cross = kind(sizes), CrossModel(*cross_size(state["cross_model"]))
        fit(clip, state["model"], path, "MPS (its CLIP)")
        fit(cross, state["cross_model"], path, "MPS (its cross-attention)")
        scale = clip.logit_scale.detach().float().exp().item()
        device, dtype = device_of(self.device), DTYPES[self.dtype]
        clip, cross = (p.eval().requires_grad_(False).to(device, dtype) for p in (clip, cross))
        return _Networks(clip, cross, scale)


class _Networks(NamedTuple):
    clip: Any  # a CLIPModel of transformers
    cross: nn.Module
    scale: float


def likeness(tokens: Tensor, condition: Tensor) -> Tensor:
    """How much each token has to do with one of the condition's, its prompt's largest being 1.

    tokens (B, L, D), condition (1, M, D) -> (B, L).
    """
    alike = (tokens @ condition[0].T).amax(-1)
    return alike / alike.amax(-1, keepdim=True)


def to_parts(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The weights of the CLIP, "model", and of the layers after it, "cross_model".

    `mps.` may stand before both, as in the file on the hub; `.fn.` is what adds the residual.
    """
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "cross_model": {}}
    for name, value in state.items():
        part, _, rest = name.removeprefix("mps.").partition(".")
        if not name.endswith(UNUSED):
            parts.setdefault(part, {})[rest.replace(".fn.", ".")] = value
    return parts


def cross_size(state: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """Width, layers, heads and width of the head of a CrossModel; of the published ones without."""
    kv, q = state.get("layers.0.0.to_kv.weight"), state.get("layers.0.0.to_q.weight")
    if kv is None or q is None:
        return 1024, 4, 16, 64
    each = kv.shape[0] // 2
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    return q.shape[1], layers, q.shape[0] // each, each


class CrossModel(nn.Module):
    """Layers of cross-attention to a text, then of attention among themselves."""

    def __init__(self, width: int, layers: int, heads: int, each: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([_Cross(width, heads, each), _Parallel(width, heads, each)])
            for _ in range(layers)
        )

    def forward(self, x: Tensor, text: Tensor, keep: Tensor) -> Tensor:
        """x (B, N, D) looks at those tokens of text (B, L, D) that keep (B, L) says."""
        for pair in self.layers:
            cross, parallel = pair  # type: ignore[misc]
            x = x + cross(x, text, keep)
            x = x + parallel(x)
        return x


class _SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * value


class _Cross(nn.Module):
    """Many heads that share one key and one value, beside a feed-forward network."""

    def __init__(self, width: int, heads: int, each: int):
        super().__init__()
        self.heads, inner = heads, 4 * width
        self.norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, heads * each, bias=False)
        self.to_kv = nn.Linear(width, 2 * each, bias=False)
        self.to_out = nn.Linear(heads * each, width, bias=False)
        self.ff = nn.Sequential(
            nn.Linear(width, 2 * inner, bias=False), _SwiGLU(), nn.Linear(inner, width, bias=False)
        )

    def forward(self, x: Tensor, text: Tensor, keep: Tensor) -> Tensor:
        x = self.norm(x)
        key, value = self.to_kv(text).chunk(2, dim=-1)
        seen = _attend(_split(self.to_q(x), self.heads), key, value, keep[:, None, None, :])
        return self.to_out(seen) + self.ff(x)


class _Parallel(nn.Module):
    """The same to itself with rotary positions; one matrix makes all of its inputs."""

    def __init__(self, width: int, heads: int, each: int):
        super().__init__()
        self.heads, inner = heads, 4 * width
        self.parts = (heads * each, each, each, 2 * inner)
        self.norm = nn.LayerNorm(width)
        self.fused_attn_ff_proj = nn.Linear(width, sum(self.parts), bias=False)
        self.attn_out = nn.Linear(heads * each, width, bias=False)
        self.ff_out = nn.Sequential(_SwiGLU(), nn.Linear(inner, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, inner = self.fused_attn_ff_proj(self.norm(x)).split(self.parts, dim=-1)
        seen = _attend(_rotated(_split(query, self.heads)), _rotated(key), value)
        return self.attn_out(seen) + self.ff_out(inner)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    """query (B, H, N, d), key and value (B, M, d) -> (B, N, H d)."""
    key, value = (part[:, None].expand(-1, query.shape[1], -1, -1) for part in (key, value))
    seen = F.scaled_dot_product_attention(query, key, value, attn_mask=keep)
    return seen.transpose(1, 2).flatten(2)


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions (2104.09864) along the last dimension but one."""
    length, width = x.shape[-2:]
    speeds = 10000 ** (-torch.arange(0, width, 2, device=x.device).float() / width)
    angles = torch.outer(torch.arange(length, device=x.device).float(), speeds).repeat(1, 2)
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
    return turned.to(x.dtype)

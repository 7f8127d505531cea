"""DreamSim (Fu et al. 2023, arXiv 2306.09344): how alike people find two images.

Vision transformers whose vectors are put together, each tuned by a LoRA on people's choices. The
folder is what the published package unpacks (MIT; DINO Apache-2.0, CLIP and OpenCLIP MIT); names
and meaning of the files are those of dreamsim 0.2.1.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .loading import building, device_of, first_file, fit, imported, read_weights, weights_file
from .preprocess import MEAN, STD, Preprocess
from .sharing import shared
from .vit_layout import to_blip, vision_size

ADAPTER = "ensemble_lora"  # the folder of the LoRA, one for all three
CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
LORA = re.compile(r"extractor_list\.(\d+)\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight$")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


class _Kind(NamedTuple):
    files: tuple[str, ...]  # of which one is there
    mean: tuple[float, ...]
    std: tuple[float, ...]
    eps: float
    act: str


KINDS = (  # in the order of the ensemble
    _Kind(
        ("checkpoints/dino_vitbase16_pretrain.pth", "dino_vitbase16_pretrain.pth"),
        **IMAGENET, eps=1e-6, act="gelu",
    ),
    _Kind(("clip_vitb16_pretrain.pth.tar",), MEAN, STD, 1e-5, "quick_gelu"),
    _Kind(("open_clip_vitb16_pretrain.pth.tar",), MEAN, STD, 1e-5, "gelu"),
)  # fmt: skip


class _Branch(NamedTuple):
    network: Any  # a BlipVisionModel of transformers
    before: tuple[Tensor, Tensor] | None  # weight and bias of CLIP's norm before the blocks
    project: Tensor | None  # (D, E) of CLIP's; without it the vector is that before the last norm


class DreamSim:
    """The published ensemble in a folder, in float32; loaded when first used."""

    def __init__(self, folder: str, *, device: str = "auto"):
        self.folder, self.device = folder, device
        self.version = f"dreamsim-1/{folder}"
        self._shared = shared(("dreamsim", folder, device), self)

    def images(self, images: Tensor) -> Tensor:
        """Unit vectors of images (B, 3, H, W) in [0, 1]: (B, D) float32."""
        return self._shared.recall("images", images, lambda: self._seen(images))

    def _seen(self, images: Tensor) -> Tensor:
        parts = [self._vectors(images, *pair) for pair in zip(KINDS, self._branches, strict=True)]
        whole = torch.cat(parts, dim=-1)
        return F.normalize(whole - whole.mean(-1, keepdim=True), dim=-1)

    def _vectors(self, images: Tensor, kind: _Kind, branch: _Branch) -> Tensor:
        network, (before, project) = branch.network, branch[1:]
        see = Preprocess(mean=kind.mean, std=kind.std, squash=True)
        x = network.embeddings(see(images.to(network.device), network.config.image_size))
        if before is not None:
            x = F.layer_norm(x, x.shape[-1:], *before, kind.eps)
        x = network.encoder(inputs_embeds=x).last_hidden_state
        return x[:, 0] if project is None else network.post_layernorm(x)[:, 0] @ project

    @functools.cached_property
    def _branches(self) -> list[_Branch]:
        return self._shared.load(self._load)

    def _load(self) -> list[_Branch]:
        folder = str(Path(self.folder) / ADAPTER)
        config = json.loads(weights_file(folder, CONFIG).read_text(encoding="utf-8"))
        path = first_file(folder, WEIGHTS)
        tuned = lora_changes(read_weights(path), config["lora_alpha"] / config["r"])
        if not tuned:
            raise ValueError(
                f"{path} holds no LoRA of DreamSim's ensemble: expected names such as base_model."
                "model.extractor_list.0.model.blocks.0.attn.qkv.lora_A.weight"
            )
        return [self._branch(number, kind, tuned) for number, kind in enumerate(KINDS)]

    def _branch(self, number: int, kind: _Kind, tuned: Mapping[tuple[int, str], Tensor]) -> _Branch:
        path = first_file(self.folder, kind.files)
        state, device = dict(read_weights(path)), device_of(self.device)
        project, *before = (
            state.pop(n, None) for n in ("proj", "pos_drop.weight", "pos_drop.bias")
        )
        for (owner, name), change in tuned.items():
            if owner == number and f"{name}.weight" in state:
                state[f"{name}.weight"] = state[f"{name}.weight"] + change
        try:
            size = vision_size(state, eps=kind.eps, act=kind.act)
        except KeyError as error:
            raise ValueError(
                f"{path} holds no vision transformer of DreamSim's: it lacks {error}"
            ) from error
        make, of = (
            imported(f"transformers:BlipVision{n}", "DreamSim") for n in ("Model", "Config")
        )
        with building():
            network = make(of(**size))
        fit(network, to_blip(state), path, "one of DreamSim's networks")
        network = network.eval().requires_grad_(False).to(device)
        weight, bias = (None if part is None else part.to(device) for part in before)
        norm = None if weight is None or bias is None else (weight, bias)
        return _Branch(network, norm, None if project is None else project.to(device))


def lora_changes(adapter: Mapping[str, Tensor], scale: float) -> dict[tuple[int, str], Tensor]:
    """What a LoRA adds to the weights, by the number of the network and the module's name."""
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, value in adapter.items():
        if found := LORA.search(name):
            halves.setdefault((int(found[1]), found[2]), {})[found[3]] = value.float()
    return {key: scale * half["B"] @ half["A"] for key, half in halves.items() if len(half) == 2}

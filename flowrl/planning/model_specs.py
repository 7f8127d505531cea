"""Shapes of text-to-image pipelines, published or in a folder, and networks built from them.

No weights are read: memory and time depend on shapes alone. Every file of `published/` names the
source of its numbers; a folder or a repository in the Hub's cache is read as it is.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.backbones.text_cache import INDEX, index_file
from flowrl.errors import UserError
from flowrl.utils.progress import announced
from flowrl.utils.untrusted import read_json

PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """A pipeline as configurations of diffusers' classes. Compared by identity, to be a key."""

    pipeline: str  # class of diffusers, as are transformer, autoencoder and scheduler
    checkpoint: str  # repository on the Hub, or folder
    source: str = ""  # where the numbers are from
    also: tuple[str, ...] = ()  # other repositories with networks of the same shapes
    # Steps that a repository among `also` was distilled to; others undo the distillation.
    few_steps: Mapping[str, int] = field(default_factory=dict)
    transformer: str
    config: Mapping[str, Any]  # of the transformer
    autoencoder: str
    autoencoder_config: Mapping[str, Any]
    autoencoder_params: int  # parameters, the encoder's included
    scheduler: str = ""  # of a published checkpoint, as is its configuration
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    text_encoders: tuple[int, ...]  # parameters of each, of the part that the pipeline loads
    text_tokens: int = 512  # that the transformer attends to, at most
    pixels: int = 1024  # side of an image where a recipe names none

    @property
    def parameters(self) -> int:
        """Return the parameters of the transformer."""
        network = build_network(self.transformer, self.config, torch.bfloat16)
        return sum(p.numel() for p in network.parameters())

    @property
    def weights(self) -> int:
        """Return the bytes of the transformer and the text encoders in 16 bits."""
        return 2 * (sum(self.text_encoders) + self.parameters)

    @property
    def channels(self) -> int:
        """Return the channels of a latent of the autoencoder."""
        config = self.autoencoder_config
        return config["latent_channels"] if "latent_channels" in config else config["z_dim"]

    @property
    def frames(self) -> bool:
        """Return whether the autoencoder's latents have an axis of frames."""
        return "z_dim" in self.autoencoder_config or "Video" in self.autoencoder

    @property
    def factor(self) -> int:
        """Return how many pixels one side of a latent's element covers."""
        return spatial_factor(self.autoencoder_config)

    @property
    def native_pixels(self) -> int:
        """Return the side of the pipeline's images where a recipe does not name any."""
        if isinstance(side := self.config.get("sample_size"), int):
            return side * self.factor
        return self.autoencoder_config.get("sample_size", self.pixels)

    def latent_shape(self, pixels: int) -> tuple[int, int, int]:
        """Return (C, h, w) of a square image. Raises UserError if it makes no whole patches."""
        packed = self.config.get("in_channels") == 4 * self.channels
        patch = 2 if packed else self.config.get("patch_size", 2)
        unit = self.factor * (patch if isinstance(patch, int) else 2)
        if pixels < unit or pixels % unit:
            raise UserError(f"images of {pixels} pixels a side: expected a multiple of {unit}")
        return self.channels, pixels // self.factor, pixels // self.factor


def spatial_factor(config: Mapping[str, Any]) -> int:
    """Return how many pixels one side of a latent's element covers, by an autoencoder's sizes."""
    for key in ("spatial_compression_ratio", "scale_factor_spatial"):
        if config.get(key):
            return config[key]
    for key in ("block_out_channels", "encoder_block_out_channels", "dim_mult"):
        if config.get(key):
            return 2 ** (len(config[key]) - 1)
    return 8


def _published() -> dict[str, ModelSpec]:
    files = {
        path.name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(PUBLISHED.glob("*.json"))
    }
    encoders = files.pop("text_encoders")
    for values in files.values():
        values["text_encoders"] = tuple(encoders[name] for name in values["text_encoders"])
        values["also"] = tuple(values.get("also", ()))
    return {name: ModelSpec(**values) for name, values in files.items()}


MODEL_SPECS = _published()


def spec_name(checkpoint: str) -> str | None:
    """Return the name of the published model with the shapes of this repository, or None."""
    return next((n for n, s in MODEL_SPECS.items() if checkpoint in (s.checkpoint, *s.also)), None)


# --- a pipeline in a folder or in the Hub's cache ------------------------------------------------


def spec_for(path: str, revision: str | None = None) -> ModelSpec:
    """Return the shapes of a published checkpoint, or of a pipeline in a folder or the Hub's cache.

    Raises:
        UserError: Unknown name, or a folder without a transformer and an autoencoder.
    """
    if (name := spec_name(path)) is not None:
        return MODEL_SPECS[name]
    file = index_file(pipeline_path(path), revision)
    if file is None:
        names = ", ".join([*(spec.checkpoint for spec in MODEL_SPECS.values()), *TINY])
        raise UserError(
            f"the configuration of {path} is not on this machine: download it first, or give its "
            f"folder as pipeline.path; these need no download: {names}"
        )
    folder, index = file.parent, _read_index(file)
    if "transformer" not in index or "vae" not in index:
        raise UserError(f"{folder} is a {index['_class_name']} without a transformer and a vae")
    config, vae_config = (_read(folder / part / "config.json") for part in ("transformer", "vae"))
    vae = build_network(index["vae"][1], vae_config, torch.float32)
    return ModelSpec(
        pipeline=index["_class_name"],
        checkpoint=str(folder),
        source=str(folder),
        transformer=index["transformer"][1],
        config=config,
        autoencoder=index["vae"][1],
        autoencoder_config=vae_config,
        autoencoder_params=sum(p.numel() for p in vae.parameters()),
        text_encoders=tuple(_text_encoders(folder, index)),
    )


def _read_index(file: Path) -> dict[str, Any]:
    """Return a model_index.json. Raises UserError where it names no pipeline class."""
    index = _read(file)
    if not isinstance(index.get("_class_name"), str):
        raise UserError(f"{file} names no pipeline class, as a pipeline of diffusers does")
    return index


def pipeline_class(path: str, revision: str | None = None) -> str:
    """Return a pipeline's class: of a published checkpoint, a folder, or model_index.json of the
    Hub, which is downloaded where it must be.

    Raises:
        UserError: No such folder or repository, or the Hub cannot be reached.
    """
    if (name := spec_name(path)) is not None:
        return MODEL_SPECS[name].pipeline
    if (file := index_file(pipeline_path(path), revision)) is not None:
        return _read_index(file)["_class_name"]
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with announced(f"looking for {path} on the Hub"):
            file = Path(hf_hub_download(path, INDEX, revision=revision))
        return _read_index(file)["_class_name"]
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{path} is no folder with a model_index.json, and the Hub does not give one "
            f"({type(error).__name__}): check the name, log in where it is gated, or download it"
        ) from error


def _text_encoders(folder: Path, index: dict[str, Any]) -> Iterator[int]:
    """Yield the parameters of each text encoder."""
    import transformers

    for name, part in index.items():
        # Settings may stand beside networks, such as numbers of layers.
        if not name.startswith("text_encoder") or not isinstance(part[0], str):
            continue
        config, kind = _read(folder / name / "config.json"), getattr(transformers, part[1])
        with torch.device("meta"):
            network = kind(kind.config_class.from_dict(config))
        yield sum(p.numel() for p in network.parameters())


def _read(path: Path) -> dict[str, Any]:
    """Return a configuration without diffusers' own notes, except the class of a pipeline."""
    try:
        config = read_json(path)
        return {k: v for k, v in config.items() if not k.startswith("_") or k == "_class_name"}
    except (OSError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def build_network(class_name: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a diffusers network on the meta device, frozen, in eval mode; skip unknown keys."""
    import diffusers
    from diffusers.models.modeling_utils import no_init_weights

    network_class = getattr(diffusers, class_name)
    parameters = inspect.signature(network_class.__init__).parameters
    with no_init_weights(), torch.device("meta"):
        network = network_class(**{k: v for k, v in config.items() if k in parameters})
    # Not diffusers' own `to`, which warns of layers that loading would leave in fp32.
    return nn.Module.to(network, dtype).requires_grad_(False).eval()

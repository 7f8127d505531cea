"""Shapes of text-to-image pipelines, published or in a folder, and networks built from them.

No weights are read: memory and time depend on shapes alone. Sources of the JSON files: the
repositories' own `config.json` and `scheduler_config.json`, diffusers' conversion scripts
(convert_{sd3,flux,sana}_to_diffusers.py), and the sizes of the files on the Hub.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.assembly.backbone import FAMILIES
from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.errors import UserError

CLIP_TOKENS = 77
# Values in a text encoder's config.json that are no arguments of its configuration.
NOT_ARGUMENTS = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextEncoder:
    """A text encoder of a pipeline. Compared by identity, so that caches can be keyed by it."""

    name: str
    model: str  # class of transformers
    config_class: str  # class of its configuration
    config: Mapping[str, Any]
    parameters: int  # of the part that the pipeline loads
    fp32_parameters: int = 0  # stay in fp32 when loaded in fp16 (`_keep_in_fp32_modules`)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights, loaded in this dtype."""
        fp32 = self.fp32_parameters if dtype == torch.float16 else 0
        return self.parameters * dtype.itemsize + fp32 * (4 - dtype.itemsize)

    def build(self, dtype: torch.dtype, **changes: Any) -> nn.Module:
        """Build it on the meta device, with `changes` in its configuration."""
        import transformers

        config = getattr(transformers, self.config_class)(**{**self.config, **changes})
        with torch.device("meta"):
            network = getattr(transformers, self.model)(config)
        return nn.Module.to(network, dtype).requires_grad_(False).eval()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSpec:
    """A pipeline as configurations of diffusers' classes. Compared by identity, to be a key."""

    family: str  # key of FAMILIES
    pipeline: str  # class of diffusers, as are transformer, autoencoder and scheduler
    checkpoint: str  # repository on the Hub, or folder
    also: tuple[str, ...] = ()  # other repositories with networks of the same shapes
    transformer: str
    config: Mapping[str, Any]  # of the transformer
    autoencoder: str
    autoencoder_config: Mapping[str, Any]
    autoencoder_params: int  # parameters, the encoder's included
    scheduler: str
    scheduler_config: Mapping[str, Any]
    text_encoders: tuple[TextEncoder, ...]
    text_tokens: int  # that the transformer attends to, at most
    pixels: int  # an image's side where Sol-RL (2604.06916) trained it; of a folder the native one

    @property
    def channels(self) -> int:
        """Return the channels of a latent."""
        return self.autoencoder_config["latent_channels"]

    @property
    def factor(self) -> int:
        """Return how many pixels one side of a latent's element covers."""
        config = self.autoencoder_config
        blocks = config.get("block_out_channels") or config["encoder_block_out_channels"]
        return 2 ** (len(blocks) - 1)

    @property
    def text_width(self) -> int:
        """Return the width of the text embeddings that the transformer attends to."""
        return self.config["caption_channels" if self.family == "sana" else "joint_attention_dim"]

    @property
    def pooled_width(self) -> int | None:
        """Return the width of the text's pooled embedding, None where there is none."""
        return self.config.get("pooled_projection_dim")

    @property
    def native_pixels(self) -> int:
        """Return the side of the pipeline's images where a recipe does not name any."""
        if "sample_size" in self.config:
            return self.config["sample_size"] * self.factor
        return self.autoencoder_config["sample_size"]

    def latent_shape(self, pixels: int) -> tuple[int, int, int]:
        """Return (C, h, w) of a square image. Raises UserError if it makes no whole patches."""
        unit = self.factor * (2 if self.family != "sana" else 1)
        if pixels < unit or pixels % unit:
            raise UserError(f"images of {pixels} pixels a side: expected a multiple of {unit}")
        return self.channels, pixels // self.factor, pixels // self.factor


def _published() -> dict[str, ModelSpec]:
    """Read the JSON files beside this module."""
    files = {
        path.name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(Path(__file__).with_suffix("").glob("*.json"))
    }
    encoders = {name: TextEncoder(**values) for name, values in files.pop("text_encoders").items()}
    for values in files.values():
        values["text_encoders"] = tuple(encoders[name] for name in values["text_encoders"])
        values["also"] = tuple(values.get("also", ()))
    return {name: ModelSpec(**values) for name, values in files.items()}


MODEL_SPECS = _published()


def model_spec(name: str) -> ModelSpec:
    """Return the published model of this name. Raises UserError for an unknown name."""
    if name not in MODEL_SPECS:
        raise UserError(f"there is no size {name!r}, expected one of {', '.join(MODEL_SPECS)}")
    return MODEL_SPECS[name]


def spec_name(checkpoint: str) -> str | None:
    """Return the name of the published model with the shapes of this repository, or None."""
    return next((n for n, s in MODEL_SPECS.items() if checkpoint in (s.checkpoint, *s.also)), None)


def text_tokens(family: str, longest: int) -> int:
    """Return how many tokens the transformer attends to when the longest text has `longest`."""
    return longest + (CLIP_TOKENS if family == "sd3" else 0)


# --- a pipeline in a folder ---------------------------------------------------------------------


def spec_for(path: str) -> ModelSpec:
    """Return the shapes of a published checkpoint, a built-in pipeline or a pipeline's folder.

    Raises:
        UserError: unknown name, or a folder without a pipeline of a family that flowrl has.
    """
    if (name := spec_name(path)) is not None:
        return MODEL_SPECS[name]
    folder = Path(pipeline_path(path))
    if not (folder / "model_index.json").is_file():
        known = ", ".join([*(spec.checkpoint for spec in MODEL_SPECS.values()), *TINY])
        raise UserError(
            f"the memory of {path} cannot be planned without its shapes: known are {known}; for "
            "another checkpoint give the folder it was downloaded to as pipeline.path"
        )
    index = _read(folder / "model_index.json")
    family = FAMILIES.get(index["_class_name"])
    if family is None:
        raise UserError(
            f"{folder} is a {index['_class_name']}, whose memory cannot be planned: expected one "
            f"of {', '.join(FAMILIES)}"
        )
    config, vae_config = (_read(folder / part / "config.json") for part in ("transformer", "vae"))
    vae = build_network(index["vae"][1], vae_config, torch.float32)
    spec = ModelSpec(
        family=family,
        pipeline=index["_class_name"],
        checkpoint=str(folder),
        transformer=index["transformer"][1],
        config=config,
        autoencoder=index["vae"][1],
        autoencoder_config=vae_config,
        autoencoder_params=sum(p.numel() for p in vae.parameters()),
        scheduler=index["scheduler"][1],
        scheduler_config=_read(folder / "scheduler" / "scheduler_config.json"),
        text_encoders=tuple(_text_encoders(folder, index)),
        text_tokens=text_tokens(family, 300 if family == "sana" else 256),
        pixels=0,
    )
    return replace(spec, pixels=spec.native_pixels)


def _text_encoders(folder: Path, index: dict[str, Any]) -> Iterator[TextEncoder]:
    import transformers

    for name, part in index.items():
        if not name.startswith("text_encoder") or part[0] is None:
            continue
        model, config = part[1], _read(folder / name / "config.json")
        is_clip = model.startswith("CLIP")  # its text part has a configuration of its own
        kind = type(transformers.CONFIG_MAPPING[config["model_type"]]()).__name__
        config = {key: value for key, value in config.items() if key not in NOT_ARGUMENTS}
        encoder = TextEncoder(
            name=name,
            model=model,
            config_class="CLIPTextConfig" if is_clip else kind,
            config=config,
            parameters=0,
        )
        network = encoder.build(torch.float32)
        yield replace(
            encoder,
            # No more than CLIP_TOKENS are counted anywhere.
            config=config | ({"max_position_embeddings": CLIP_TOKENS} if is_clip else {}),
            parameters=sum(p.numel() for p in network.parameters()),
            fp32_parameters=keep_fp32(network),
        )


def keep_fp32(network: Any) -> int:
    """Cast what transformers keeps in fp32 beside fp16 to fp32; return how many parameters."""
    names = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    found = 0
    for name, parameter in network.named_parameters():
        if names & set(name.split(".")):
            parameter.data = parameter.data.float()
            found += parameter.numel()
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return a configuration without diffusers' own notes, except the class of a pipeline."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return {k: v for k, v in config.items() if not k.startswith("_") or k == "_class_name"}


# --- networks -----------------------------------------------------------------------------------


def build_network(class_name: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a diffusers network on the meta device, frozen, in eval mode; skip unknown keys."""
    import diffusers

    network_class = getattr(diffusers, class_name)
    known = inspect.signature(network_class.__init__).parameters
    with torch.device("meta"):
        network = network_class(**{k: v for k, v in config.items() if k in known})
    # Not diffusers' own `to`, which warns of layers that loading would leave in fp32.
    return nn.Module.to(network, dtype).requires_grad_(False).eval()


def build_transformer(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a published transformer with random weights on the device; frozen, in eval mode.

    layers: blocks of each kind, None for all. Raises UserError for an unknown name.
    """
    spec = model_spec(name)
    network = build_network(spec.transformer, shortened(spec.config, layers), dtype)
    return _filled(network, device, seed)


def build_autoencoder(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    encoder: bool = True,
    seed: int = 0,
) -> nn.Module:
    """Build a published autoencoder like `build_transformer`, on request without its encoder."""
    spec = model_spec(name)
    network = build_network(spec.autoencoder, spec.autoencoder_config, dtype)
    if not encoder:
        network.encoder = nn.Identity()
    return _filled(network, device, seed)


def build_pipeline(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    encoder: bool = False,
    seed: int = 0,
) -> Any:
    """Build diffusers' pipeline around the two networks above, without text encoders."""
    import diffusers

    spec = model_spec(name)
    pipeline_class = getattr(diffusers, spec.pipeline)
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(pipeline_class.__init__).parameters)
    del parts["self"]
    parts["transformer"] = build_transformer(
        name, device=device, dtype=dtype, layers=layers, seed=seed
    )
    parts["vae"] = build_autoencoder(name, device=device, dtype=dtype, encoder=encoder, seed=seed)
    parts["scheduler"] = getattr(diffusers, spec.scheduler)(**spec.scheduler_config)
    return pipeline_class(**parts)


def shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Return a transformer's configuration with at most `layers` blocks of each kind."""
    config = dict(config)
    if layers is None:
        return config
    if layers < 2:  # the last block of SD3 lacks layers that the others have
        raise UserError(f"layers is {layers}, expected 2 or more")
    for kind in ("num_layers", "num_single_layers"):
        if kind in config:
            config[kind] = min(config[kind], layers)
    if dual := config.get("dual_attention_layers"):
        config["dual_attention_layers"] = [i for i in dual if i < config["num_layers"]]
    return config


def _filled(network: nn.Module, device: str | torch.device, seed: int) -> nn.Module:
    if torch.device(device).type != "meta":
        network.to_empty(device=device)
        randomise(network, seed)
    return network


@torch.no_grad()
def randomise(network: nn.Module, seed: int) -> None:
    """Fill the weights in place with random numbers that keep the scale of the activations.

    Matrices and kernels are normal with variance 1 / fan-in, factors of norms 1, biases 0.
    """
    tensors: dict[str, Tensor] = dict(network.named_parameters()) | dict(network.named_buffers())
    generator = torch.Generator(next(iter(tensors.values())).device).manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)

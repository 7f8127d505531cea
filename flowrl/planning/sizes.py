"""Networks of published sizes, without weights on the meta device or with random ones.

What a step costs depends on shapes alone, so that speed and memory can be known without weights.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.planning.model_specs import SIZES, Size, size_of, size_of_checkpoint

__all__ = [
    "SIZES",
    "Size",
    "build_autoencoder",
    "build_decoder",
    "build_pipeline",
    "build_scheduler",
    "build_text_encoders",
    "build_transformer",
    "randomise",
    "shortened",
    "size_of",
    "size_of_checkpoint",
]


def build_transformer(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """The transformer of a size with random weights, made on the device; frozen, in eval mode.

    layers: blocks of each kind, to be quick where only the way is tested; None is all of them.
    Raises UserError for an unknown name.
    """
    size = size_of(name)
    return _build(size.transformer, shortened(size.config, layers), device, dtype, seed)


def build_autoencoder(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    encoder: bool = True,
    seed: int = 0,
) -> nn.Module:
    """The autoencoder of a size; without its encoder where pictures are only made.

    Raises UserError for an unknown name.
    """
    size = size_of(name)
    return _build(size.autoencoder, size.autoencoder_config, device, dtype, seed, encoder=encoder)


def build_decoder(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> nn.Module:
    """The autoencoder of a size without its encoder, random; `.decode` is what it is for.

    Raises UserError for an unknown name.
    """
    return build_autoencoder(name, device=device, dtype=dtype, encoder=False, seed=seed)


def build_text_encoders(name: str, *, dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    """All text encoders of a size, on the meta device. Raises UserError for an unknown name."""
    import transformers

    modules: list[nn.Module] = []
    for encoder in size_of(name).text_encoders:
        config = getattr(transformers, encoder.config_class)(**encoder.config)
        with torch.device("meta"):
            module = getattr(transformers, encoder.model)(config)
        modules.append(nn.Module.to(module, dtype).requires_grad_(False).eval())
    return modules


def build_scheduler(name: str) -> Any:
    """The scheduler that the size's repository names, as configured there.

    Raises UserError for an unknown name.
    """
    import diffusers

    size = size_of(name)
    return getattr(diffusers, size.scheduler)(**size.scheduler_config)


def build_pipeline(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    encoder: bool = False,
    seed: int = 0,
) -> Any:
    """The size's own pipeline of diffusers around random networks, without text encoders.

    layers: as `build_transformer` has it; encoder: as `build_autoencoder` has it. Raises UserError
    for an unknown name.
    """
    import diffusers

    made = getattr(diffusers, size_of(name).pipeline)
    parts = dict.fromkeys(inspect.signature(made.__init__).parameters)
    del parts["self"]
    return made(
        **parts
        | {
            "transformer": build_transformer(
                name, device=device, dtype=dtype, layers=layers, seed=seed
            ),
            "vae": build_autoencoder(name, device=device, dtype=dtype, encoder=encoder, seed=seed),
            "scheduler": build_scheduler(name),
        }
    )


def shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A transformer's configuration with at most `layers` blocks of each kind, as wide as ever."""
    config = dict(config)
    if layers is None:
        return config
    if layers < 2:  # the last block of SD3 lacks layers that the others have
        raise UserError(f"layers is {layers}, expected 2 or more")
    for kind in ("num_layers", "num_single_layers"):
        if kind in config:
            config[kind] = min(config[kind], layers)
    if "dual_attention_layers" in config:
        config["dual_attention_layers"] = tuple(
            i for i in config["dual_attention_layers"] if i < config["num_layers"]
        )
    return config


def _build(
    name: str,
    config: Mapping[str, Any],
    device: str | torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    encoder: bool = True,
) -> nn.Module:
    import diffusers

    made = getattr(diffusers, name)
    unknown = set(config) - set(inspect.signature(made.__init__).parameters)
    assert not unknown, f"{name} of this diffusers does not know {sorted(unknown)}"
    with torch.device("meta"):
        module: nn.Module = made(**config)
    if not encoder:
        module.encoder = nn.Identity()
    # Not diffusers' own `to`, which speaks up about layers that loading would leave in fp32.
    nn.Module.to(module, dtype).requires_grad_(False).eval()
    if torch.device(device).type != "meta":
        module.to_empty(device=device)
        randomise(module, seed)
    return module


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Weights that keep the scale of what goes through them, in place and where they lie.

    Matrices and kernels are normal with variance 1 / fan-in, factors of norms 1, biases 0.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    device = next(iter(tensors.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)

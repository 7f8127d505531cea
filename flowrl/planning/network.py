"""A published transformer of some depth on the meta device, its inputs and its adapter."""

import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.planning.sizes import Size
from flowrl.planning.tracking import on_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A class of diffusers or transformers and its configuration as JSON, to be a key."""

    made: str
    config: str

    def of(self, changes: Mapping[str, Any]) -> "Module":
        return as_module(self.made, json.loads(self.config) | dict(changes))


def as_module(made: str, config: Mapping[str, Any]) -> Module:
    return Module(made=made, config=json.dumps(dict(config), sort_keys=True))


def build(module: Module, dtype: torch.dtype) -> nn.Module:
    """On the meta device, frozen and in eval mode."""
    import diffusers

    made = getattr(diffusers, module.made)
    known = inspect.signature(made.__init__).parameters
    config = {k: v for k, v in json.loads(module.config).items() if k in known}
    with torch.device("meta"):
        network: nn.Module = made(**config)
    nn.Module.to(network, dtype)  # diffusers' own warns of layers that loading leaves in fp32
    return network.requires_grad_(False).eval()


def add_adapter(network: nn.Module, rank: int, targets: tuple[str, ...]) -> list[nn.Parameter]:
    """PEFT's LoRA in fp32 -> its parameters, each with a gradient, as after a first backward."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.add_adapter(config)  # type: ignore[operator]
    found = [p for name, p in network.named_parameters() if "lora_" in name]
    for parameter in found:
        parameter.data = parameter.data.float()
        parameter.grad = torch.empty_like(parameter)
    return found


def adapter_parameters(network: nn.Module, rank: int, targets: tuple[str, ...]) -> int:
    """Numbers of a LoRA: rank * (in + out) of every layer whose name ends in one of `targets`."""
    found = 0
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and ends_in(name, targets):
            weight = layer.weight
            found += rank * (weight.shape[0] + weight[0].numel())
    return found


def ends_in(name: str, targets: tuple[str, ...]) -> bool:
    """PEFT's rule for lists: the name itself, or its last parts."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


# --- depth ------------------------------------------------------------------------------------


def depths(module: Module) -> dict[str, int]:
    """Blocks of each kind; "dual" are SD3.5-Medium's first ones, with a second attention."""
    config = json.loads(module.config)
    found = {key: config[key] for key in ("num_layers", "num_single_layers") if key in config}
    if dual := len(config.get("dual_attention_layers") or ()):
        found = {"dual": dual, "num_layers": found["num_layers"] - dual}
    return found


def of_depths(module: Module, depth: Mapping[str, int]) -> Module:
    """The same network with other numbers of blocks."""
    changes: dict[str, Any] = dict(depth)
    dual = changes.pop("dual", 0)
    changes["num_layers"] += dual
    if "dual_attention_layers" in json.loads(module.config):
        changes["dual_attention_layers"] = list(range(dual))
    return module.of(changes)


# --- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of one forward. rows: pictures, twice as many with guidance; height, width: of latents."""

    family: str
    rows: int
    channels: int
    height: int
    width: int
    text_tokens: int
    text_width: int
    pooled_width: int | None
    guidance: bool  # an input of the network

    @property
    def latent(self) -> int:
        """Numbers in one latent."""
        return self.channels * self.height * self.width


def shapes_of(size: Size, rows: int, height: int, width: int, text_tokens: int | None) -> Shapes:
    """height, width: pixels. Raises UserError for sides that the network cannot patch."""
    for side in (height, width):
        size.latent_shape(side)
    return Shapes(
        family=size.family,
        rows=rows,
        channels=size.channels,
        height=height // size.factor,
        width=width // size.factor,
        text_tokens=size.text_tokens if text_tokens is None else text_tokens,
        text_width=size.text_width,
        pooled_width=size.pooled_width,
        guidance=bool(size.config.get("guidance_embeds")),
    )


def inputs(s: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the backbone of the family hands to its transformer."""
    given = {
        "hidden_states": on_meta(s.rows, s.channels, s.height, s.width, dtype=dtype),
        "timestep": on_meta(s.rows, dtype=torch.float32),
        "encoder_hidden_states": on_meta(s.rows, s.text_tokens, s.text_width, dtype=dtype),
    }
    if s.pooled_width is not None:
        given["pooled_projections"] = on_meta(s.rows, s.pooled_width, dtype=dtype)
    if s.family == "sana":
        given["encoder_attention_mask"] = on_meta(s.rows, s.text_tokens, dtype=torch.long)
    if s.family == "flux":
        tokens = s.height // 2 * (s.width // 2)
        given["hidden_states"] = on_meta(s.rows, tokens, 4 * s.channels, dtype=dtype)
        given["timestep"] = on_meta(s.rows, dtype=dtype)
        given["txt_ids"] = on_meta(s.text_tokens, 3, dtype=dtype)
        given["img_ids"] = on_meta(tokens, 3, dtype=dtype)
        if s.guidance:
            given["guidance"] = on_meta(s.rows, dtype=torch.float32)
    return given

"""A network of a published size with random weights, as a backbone: its costs, not its pictures."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backbones.sd3 import LORA_TARGETS
from flowrl.functional.schedule import linear_shifted_sigmas
from flowrl.sizes import build_decoder, build_transformer, size_of
from flowrl.trajectory import Conditioning

# What Sol-RL (2604.06916) adapts, in diffusers' names.
TARGETS = {
    "sd3": LORA_TARGETS,
    "flux": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    "sana": tuple(
        f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")
    ),
}


class RandomBackbone:
    """A size of `SIZES` behind the `Backbone` protocol: no text encoders, no weights to load.

    pixels: a picture's side, None for the size's own. layers: blocks of each kind, None for all.
    The text is noise by its length alone; what is computed from it takes the time of the real one.
    Without guidance; FLUX's guidance input is 1, as in Sol-RL. Raises UserError for an unknown
    size and for pictures that cannot be patched.
    """

    pipeline: Any = None

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pixels: int | None = None,
        layers: int | None = None,
        seed: int = 0,
    ):
        self.size = size_of(name)
        self.pixels = self.size.pixels if pixels is None else pixels
        self.shape = self.size.latent_shape(self.pixels)
        self.device, self.dtype = device, dtype
        self.lora_targets: tuple[str, ...] = TARGETS[self.size.family]
        self.transformer: nn.Module = build_transformer(
            name, device=device, dtype=dtype, layers=layers, seed=seed
        )
        self.decoder: Any = build_decoder(name, device=device, dtype=dtype, seed=seed)

    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        generator = torch.Generator(self.device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            drawn = torch.randn(
                len(prompts), *shape, generator=generator, device=self.device, dtype=self.dtype
            )
            return drawn

        tensors = {"embeds": noise(self.size.text_tokens, self.size.text_width)}
        if self.size.pooled_width is not None:
            tensors["pooled"] = noise(self.size.pooled_width)
        return Conditioning(tensors=tensors)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return _VELOCITY[self.size.family](
            self.transformer, x.to(self.dtype), sigma.expand(len(x)), cond.tensors
        )

    def decode(self, x0: Tensor) -> Tensor:
        config = self.decoder.config
        shift = config.get("shift_factor") or 0.0
        z = x0.to(self.dtype) / config.scaling_factor + shift
        return (self.decoder.decode(z, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1).float()

    def encode_images(self, images: Tensor) -> Tensor:
        raise NotImplementedError("a random backbone only draws: it has no encoder")

    def picture_size(self) -> tuple[int, int]:
        return self.pixels, self.pixels

    def latent_shape(self) -> tuple[int, ...]:
        return self.shape

    def sigmas(self, steps: int) -> Tensor:
        return linear_shifted_sigmas(steps).to(self.device)


def _sd3(network: nn.Module, x: Tensor, sigma: Tensor, text: Any) -> Tensor:
    return network(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=text["embeds"],
        pooled_projections=text["pooled"],
        return_dict=False,
    )[0]


def _sana(network: nn.Module, x: Tensor, sigma: Tensor, text: Any) -> Tensor:
    return network(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=text["embeds"],
        return_dict=False,
    )[0]


def _flux(network: nn.Module, x: Tensor, sigma: Tensor, text: Any) -> Tensor:
    """Patches of 2 x 2 latents are tokens; each has its place, the text's have none."""
    tokens = nn.functional.pixel_unshuffle(x, 2)  # (B, C * 4, h / 2, w / 2)
    grid = tokens.shape[-2:]
    places = torch.cartesian_prod(*(torch.arange(n, device=x.device) for n in grid))
    image_ids = nn.functional.pad(places, (1, 0)).to(x.dtype)
    v = network(
        hidden_states=tokens.flatten(2).transpose(1, 2),
        timestep=sigma.to(x.dtype),
        guidance=torch.ones_like(sigma),
        encoder_hidden_states=text["embeds"],
        pooled_projections=text["pooled"],
        txt_ids=image_ids.new_zeros(text["embeds"].shape[1], 3),
        img_ids=image_ids,
        return_dict=False,
    )[0]
    return nn.functional.pixel_shuffle(v.transpose(1, 2).unflatten(2, grid), 2)


_VELOCITY: dict[str, Callable[[nn.Module, Tensor, Tensor, Any], Tensor]] = {
    "sd3": _sd3,
    "flux": _flux,
    "sana": _sana,
}

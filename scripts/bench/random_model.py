"""A published network with random weights as a backbone: its costs, not its images."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.planning.model_specs import MODEL_SPECS, ModelSpec, build_network
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import with_network
from flowrl.trajectory import Conditioning

SMALL = 1e-3  # standard deviation of what `move` adds to the adapter
# What networks call the width of their text embeddings.
TEXT_WIDTHS = ("joint_attention_dim", "caption_channels")


def model_spec(name: str) -> ModelSpec:
    """Return the published model of this name. Raises UserError for an unknown name."""
    if name not in MODEL_SPECS:
        raise UserError(f"no published size {name!r}: expected one of {', '.join(MODEL_SPECS)}")
    return MODEL_SPECS[name]


class RandomBackbone:
    """The backbone of a published model's family around random weights and noise as text.

    Args:
        pixels: side of an image, None for the one that Sol-RL (2604.06916) trained.
        layers: blocks of each kind, None for all.
        guidance: 1 is none, and FLUX's input in Sol-RL.

    Raises:
        UserError: unknown name, or images that cannot be cut into patches.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pixels: int | None = None,
        layers: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
    ):
        self.size = model_spec(name)
        self.pixels = self.size.pixels if pixels is None else pixels
        self.size.latent_shape(self.pixels)  # or the sentence that says why not
        self.device, self.dtype, self.guidance = device, dtype, guidance
        self.pipeline = build_pipeline(name, device=device, dtype=dtype, layers=layers, seed=seed)
        self.family = PipelineBackbone(
            self.pipeline, guidance=guidance, height=self.pixels, width=self.pixels
        )
        self.transformer: nn.Module = self.family.transformer
        self.lora_targets: tuple[str, ...] = self.family.lora_targets
        self.decode, self.image_size = self.family.decode, self.family.image_size
        self.latent_shape, self.sigmas = self.family.latent_shape, self.family.sigmas

    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        return self.family.encode(prompts, negatives)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        # Copies of this backbone hold other networks of the same shape.
        return with_network(self.family, self.transformer).velocity(x, sigma, cond)

    def encode_images(self, images: Tensor) -> Tensor:
        raise NotImplementedError("a random backbone only samples: it has no encoder")


class RandomTexts(TextCache):
    """Asks the pipeline each time: without text encoders, the cache would take them for freed."""

    def __call__(self, prompts: Sequence[PromptRecord]) -> Conditioning:
        return self.backbone.encode([p.text for p in prompts], [""] * len(prompts))


def noise_texts(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a pipeline's `encode_prompt` that gives noise in place of texts, by their letters."""

    def noise(texts: Sequence[str], *shape: int) -> Tensor:
        generators = (torch.Generator(device).manual_seed(crc32(t.encode())) for t in texts)
        rows = [torch.randn(shape, generator=g, device=device, dtype=dtype) for g in generators]
        return torch.stack(rows)

    def encode_prompt(prompt: Any = None, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        prompts = prompt if isinstance(prompt, list) else [prompt]
        negatives = [""] * len(prompts)
        width = next(spec.config[name] for name in TEXT_WIDTHS if name in spec.config)
        embeds, negative = (noise(texts, spec.text_tokens, width) for texts in (prompts, negatives))
        if spec.pipeline == "SanaPipeline":
            mask = torch.ones(embeds.shape[:2], device=device, dtype=torch.long)
            return embeds, mask, negative, mask
        pooled_width = spec.config.get("pooled_projection_dim", 1)
        pooled = noise(prompts, pooled_width)
        if spec.pipeline == "FluxPipeline":  # text ids have no batch
            return embeds, pooled, torch.zeros(spec.text_tokens, 3, device=device, dtype=dtype)
        return embeds, negative, pooled, noise(negatives, pooled_width)

    return encode_prompt


@torch.no_grad()
def move(policy: Policy) -> None:
    """Change the adapter as an update would, so that there are new weights to put in."""
    for parameter in policy.parameters():
        parameter += SMALL * torch.randn_like(parameter)


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
    # A class of its own, because copies of a pipeline are made from its class.
    texts = staticmethod(noise_texts(spec, torch.device(device), dtype))
    return type(spec.pipeline, (pipeline_class,), {"encode_prompt": texts})(**parts)


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
